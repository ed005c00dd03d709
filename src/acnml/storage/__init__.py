"""Save and load posteriors, curvatures, SWAG states, densities and predictors, without pickle.

Files are in the format safetensors, with a checksum over everything in them. A predictor or a
density is stored without its network, or networks. The user passes these again to `load`, which
compares them with descriptions in the file: all modules, their settings, and hashes of all weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from acnml import (
    atypicality,
    calibration,
    decisions,
    features,
    fit,
    posteriors,
    predictors,
    solve,
)
from acnml._algebra import dual
from acnml._util.params import Params
from acnml.calibration import heads
from acnml.classifier import Classifier, as_classifier
from acnml.storage import disk
from acnml.storage.disk import CHECKSUM, FORMAT_VERSION, HEADER, StorageError
from acnml.storage.network import Weights, require_same
from acnml.storage.tree import Encoder, decode

__all__ = ["CHECKSUM", "FORMAT_VERSION", "HEADER", "KINDS", "StorageError", "load", "save"]

Network: TypeAlias = Classifier | nn.Module

_CURVATURES = "DiagonalCurvature FullCurvature KroneckerCurvature"
_PREDICTORS = "Map Bma Acnml Ensemble Tempered McDropout Glm Probit LogitSampling"

# The only classes that a file may contain, by the rooms that they are from. Loading constructs no
# others.
KINDS: dict[str, Any] = {
    name: getattr(room, name)
    for room, names in (
        (posteriors, "Diagonal Full Kronecker LowRank EigenBlock"),
        (dual, "Affine"),
        (fit, f"{_CURVATURES} Factors Basis Swag"),
        (solve, "Reference Gradient Linearised Influence"),
        (predictors, f"{_PREDICTORS} IfComp Pnml Modes"),
        (calibration, "Calibrated Calibrator CalibrationRow"),
        (heads, "Head"),
        (atypicality, "Atypicality"),
        (features, "Folding Place"),
        (decisions, "Outcomes Abstention Certificate Monitor"),
    )
    for name in names.split()
}


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Store a posterior, a curvature, a `Swag`, or a predictor without its network.

    The write is atomic: if it fails, with a `StorageError`, an existing file is unchanged. Only
    regular files are replaced; a symbolic link is followed. The mode of the file follows the umask.

    Save a predictor before its network is trained further. Predictors share weights with the
    network, and the file describes the network as it is now. A `Calibrated` predictor is refused if
    the network's last layer has changed since it was calibrated. Changes of other layers alone, and
    of networks of other predictors, cannot be noticed.

    >>> import tempfile
    >>> posterior = acnml.Diagonal({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     acnml.save(posterior, f"{folder}/posterior.safetensors")
    ...     again = acnml.load(f"{folder}/posterior.safetensors")
    >>> torch.equal(again.var["w"], posterior.var["w"])
    True
    """
    if type(value).__name__ not in KINDS:
        raise TypeError(
            "only posteriors, curvatures, Swag, predictors, calibrated networks and what follows "
            f"from these can be stored, got a {type(value).__name__}"
        )
    if isinstance(value, fit.Swag) and value.updates == 0:
        raise ValueError("the Swag has not collected any weights: store it after the first update")
    encoder = Encoder(KINDS)
    tree = encoder.encode(value)
    disk.write(Path(path), disk.Stored(tree, encoder.descriptions(), encoder.tensors))


def load(
    path: str | os.PathLike[str],
    classifier: Network | Sequence[Network] | None = None,
    *,
    weights: Weights = "exact",
) -> Any:  # and not a union, because callers would have to narrow it every time
    """Load a value stored by `save`; to load a predictor or a density, also pass its network.

    A damaged file raises a `StorageError`, and so does a network that differs from the one that the
    value was stored with: in its modules, their settings or its weights, except for weights that
    are in the file. Settings are attributes of modules that are plain data (numbers, strings,
    functions by their names, and lists and mappings of them). The result is on the CPU. A file may
    be loaded while it is saved again: the result is one of the two.

    Args:
        path: of the file.
        classifier: the network of a stored predictor or density, as a `Classifier` or as the model
            itself. If it has several, as an `Ensemble` or `Modes` may, a list of them in the order
            in which they first occur in it.
        weights: "exact" requires the same weights in the same precision, on any device. "rounded"
            also accepts copies of the network in another precision, such as half precision.

    >>> import tempfile
    >>> model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    >>> predict = acnml.Map(acnml.Classifier(model))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     acnml.save(predict, f"{folder}/predictor.safetensors")
    ...     again = acnml.load(f"{folder}/predictor.safetensors", model)  # it belongs to a network
    >>> torch.equal(again(x), predict(x))
    True
    """
    several: Any = classifier if isinstance(classifier, (list, tuple)) else [classifier]
    given = [as_classifier(network) for network in several if network is not None]
    stored = disk.read(Path(path))
    if len(given) != len(stored.networks):
        how = ("load(path)", "load(path, model)", "load(path, [model, ...]), in their order")
        raise StorageError(
            f"{path} holds a {stored.value.get('kind')}. Of its {len(stored.networks)} networks, "
            f"which are not in the file, {len(given)} were given: use "
            f"{how[min(len(stored.networks), 2)]}"
        )

    def restore(overrides: Params, temperature: float, index: int) -> Classifier:
        return _at_temperature(given[index].at(overrides), temperature)

    try:
        for one, description in zip(given, stored.networks, strict=True):
            require_same(one, description, weights)
        return decode(stored.value, stored.tensors, KINDS, restore)
    except (LookupError, TypeError, ValueError) as error:
        raise StorageError(f"{path} cannot be restored: {error}") from error


def _at_temperature(classifier: Classifier, temperature: float) -> Classifier:
    """Return the classifier with the stored temperature, unless it has another one already."""
    if classifier.temperature == temperature:
        return classifier
    if classifier.temperature != 1:
        raise ValueError(
            f"the predictor was stored with temperature {temperature:g}, but the given classifier "
            f"has {classifier.temperature:g}; pass a classifier without a temperature"
        )
    return classifier.tempered(temperature)
