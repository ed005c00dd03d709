"""Save and load posteriors, curvatures, SWAG states, densities and predictors, without pickle.

Files are in the format safetensors, with a checksum over everything in them. A predictor or a
density, such as a `Typicality`, is stored without its network. The user passes the network again to
`load`, which compares it with a description in the file: all modules, their settings, and hashes of
all weights. A predictor of several networks, such as an `Ensemble` or `Modes`, needs all of them
again, in the same order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, overload

from torch import nn

from acnml._util.params import Params
from acnml.classifier import Classifier, require_classifier
from acnml.fit import Swag
from acnml.predictors import Predictor
from acnml.storage import disk, sampled
from acnml.storage.disk import CHECKSUM, FORMAT_VERSION, HEADER, StorageError
from acnml.storage.network import EXACT, ROUNDED, Weights, require_same
from acnml.storage.tree import (
    KINDS,
    NEEDS_NETWORK,
    STANDALONE,
    Standalone,
    count_networks,
    decode,
    encode,
    fields,
    identity,
)
from acnml.typicality import Density

Network: TypeAlias = Classifier | nn.Module

__all__ = ["CHECKSUM", "FORMAT_VERSION", "HEADER", "KINDS", "StorageError", "load", "save"]


def save(value: Standalone | Predictor | Density, path: str | os.PathLike[str]) -> None:
    """Store a posterior, a curvature, a `Swag`, or a predictor or density without its network.

    The write is atomic: if it fails, no partial file is left and an existing file is unchanged. A
    file that cannot be written raises a `StorageError`. Only regular files are replaced; a symbolic
    link is followed. The mode of the file follows the umask.

    Save a predictor before its network is trained further. Predictors share weights with the
    network, and the file describes the network as it is now. A `Calibrated` predictor is refused if
    the network's last layer has changed since it was calibrated (`Calibrated.require_current`).
    Changes of other layers alone, and of networks of other predictors, cannot be noticed.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "posterior.safetensors"
    ...     acnml.save(posterior, path)
    ...     again = acnml.load(path)
    >>> torch.equal(again.mean["weight"], posterior.mean["weight"])
    True
    """
    if not isinstance(value, (*STANDALONE, *NEEDS_NETWORK)):
        kind = type(value).__name__
        raise TypeError(
            "only posteriors, curvatures, Swag, densities and predictors can be stored, got a "
            f"{kind}"
        )
    if isinstance(value, Swag) and value.updates == 0:
        raise ValueError("the Swag has not collected any weights: store it after the first update")
    networks = list(dict.fromkeys(identity(classifier) for classifier in _classifiers(value)))
    disk.require_target(Path(path))
    tensors: Params = {}
    tree = encode(value, "", tensors, networks)
    disk.write(Path(path), tree, tensors)


# The return type is Any and not a union, because callers would have to narrow a union every time.
@overload
def load(path: str | os.PathLike[str]) -> Any: ...
@overload
def load(
    path: str | os.PathLike[str],
    classifier: Network | Sequence[Network],
    *,
    weights: Weights = ...,
) -> Any: ...
def load(
    path: str | os.PathLike[str],
    classifier: Network | Sequence[Network] | None = None,
    *,
    weights: Weights = "exact",
) -> Any:
    """Load a value stored by `save`; to load a predictor or a density, also pass its network.

    A damaged file raises a `StorageError`, and so does a network that differs from the one that the
    value was stored with: in its modules, their settings or its weights, except for weights
    that are in the file. Tensors are loaded to the CPU.

    Args:
        path: of the file.
        classifier: the network of a stored predictor or density, as a `Classifier` or as the model
            itself. If it has several, as an `Ensemble` or `Modes` may, a list of them in the order
            in which they first occur in it.
        weights: "exact" requires the same weights in the same precision, on any device. "rounded"
            also accepts copies of the network in another precision, such as half precision.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
    >>> predict = acnml.Acnml(classifier, posterior, alpha=0.1)
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "predictor.safetensors"
    ...     acnml.save(predict, path)
    ...     again = acnml.load(path, classifier)  # predictors belong to a network
    >>> x = torch.randn(5, 4)
    >>> torch.equal(again(x), predict(x))
    True
    """
    given = _given(classifier)
    if not isinstance(weights, str) or weights not in (EXACT, ROUNDED):
        raise ValueError(f"weights must be 'exact' or 'rounded', got {weights!r}")
    stored = disk.read(Path(path))
    kind = str(stored.value.get("kind"))
    is_standalone = issubclass(KINDS.get(kind, object), STANDALONE)
    if not given and not is_standalone:
        raise StorageError(f"{path} holds a {kind} without its network: use load(path, model)")
    if given and is_standalone:
        raise StorageError(f"{path} holds a {kind}, which has no network: use load(path)")
    try:
        _require_count(given, count_networks(stored.value))
        value = decode(stored.value, stored.tensors, partial(_restored, given, weights))
    except disk.DAMAGE as error:
        raise StorageError(f"{path} cannot be restored: {error}") from error
    if not isinstance(value, (*STANDALONE, *NEEDS_NETWORK)):
        raise StorageError(f"{path} holds only a {kind}, which acnml.save cannot have written")
    return value


def _given(classifier: Network | Sequence[Network] | None) -> tuple[Classifier, ...]:
    """Return the networks that were passed as classifiers, checked."""
    if classifier is None:
        return ()
    given = tuple(classifier) if isinstance(classifier, (list, tuple)) else (classifier,)
    if not given:
        raise ValueError("the list of classifiers is empty: pass one for every network")
    wrapped = tuple(Classifier(one) if isinstance(one, nn.Module) else one for one in given)
    for one in wrapped:
        require_classifier(one)
    return wrapped


def _require_count(given: Sequence[Classifier], stored: int) -> None:
    if given and len(given) != max(stored, 1):
        raise ValueError(
            f"the predictor was stored with {stored} networks, but {len(given)} were given; pass a "
            "list of its classifiers, in the order in which they first occur in it"
        )


def _restored(
    given: Sequence[Classifier],
    weights: Weights,
    *,
    network: Mapping[str, Any] | None,
    overrides: Params,
    temperature: float = 1.0,
    index: int = 0,
    fingerprints: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Classifier:
    """Return the given classifier with the overrides and the temperature of the stored one.

    Files of format 1 have fingerprints instead of a description of the network, the oldest only
    overrides. If the given classifier already has a temperature, it must be the stored one.
    Otherwise the logits would silently be divided by two temperatures.
    """
    if not given:
        raise ValueError("a value that needs no network contains a classifier")
    classifier = given[index]
    if network is not None:
        require_same(classifier, network, weights)
    viewed = classifier.at(overrides)
    sampled.require_alike(viewed.tensors, fingerprints)
    if classifier.temperature == temperature:
        return viewed
    if classifier.temperature != 1:
        raise ValueError(
            f"the predictor was stored with temperature {temperature:g}, but the given classifier "
            f"has {classifier.temperature:g}; pass a classifier without a temperature"
        )
    return viewed.tempered(temperature)


def _classifiers(value: Any) -> list[Classifier]:
    """Return all classifiers inside a value."""
    if isinstance(value, Classifier):
        return [value]
    parts = value if isinstance(value, tuple) else ()
    if isinstance(value, NEEDS_NETWORK) and dataclasses.is_dataclass(value):
        parts = tuple(fields(value).values())
    return [classifier for part in parts for classifier in _classifiers(part)]
