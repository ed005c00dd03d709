"""Save and load posteriors, curvatures, SWAG states and predictors: safetensors, no pickle.

A file has a checksum over everything in it. A predictor is stored without its network, and the user
passes the network again to `load`, which compares it with a description in the file: all modules,
their settings, and hashes of all weights.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

from acnml._util.params import Params
from acnml.classifier import Classifier, require_classifier
from acnml.fitting import Swag
from acnml.predictors import Predictor
from acnml.storage import disk, sampled
from acnml.storage.disk import CHECKSUM, FORMAT_VERSION, HEADER, StorageError
from acnml.storage.network import EXACT, ROUNDED, Weights, require_same
from acnml.storage.tree import (
    KINDS,
    NEEDS_NETWORK,
    STANDALONE,
    Standalone,
    decode,
    encode,
    fields,
)
from acnml.typicality import Density

__all__ = ["CHECKSUM", "FORMAT_VERSION", "HEADER", "KINDS", "StorageError", "load", "save"]


def save(value: Standalone | Predictor | Density, path: str | os.PathLike[str]) -> None:
    """Store a posterior, a curvature, a `Swag`, or a predictor without its network.

    The write is atomic: if it fails, no partial file is left and an existing file is unchanged. A
    file that cannot be written raises a `StorageError`. Only regular files are replaced; a symbolic
    link is followed. The mode of the file follows the umask.
    """
    if not isinstance(value, (*STANDALONE, *NEEDS_NETWORK)):
        kind = type(value).__name__
        raise TypeError(
            f"only posteriors, curvatures, Swag and predictors can be stored, got a {kind}"
        )
    if isinstance(value, Swag) and value.updates == 0:
        raise ValueError("the Swag has not collected any weights: store it after the first update")
    _require_one_network(value)
    disk.require_target(Path(path))
    tensors: Params = {}
    tree = encode(value, "", tensors)
    disk.write(Path(path), tree, tensors)


# The return type is Any and not a union, because callers would have to narrow a union every time.
@overload
def load(path: str | os.PathLike[str]) -> Any: ...
@overload
def load(
    path: str | os.PathLike[str], classifier: Classifier, *, weights: Weights = ...
) -> Predictor: ...
def load(
    path: str | os.PathLike[str],
    classifier: Classifier | None = None,
    *,
    weights: Weights = "exact",
) -> Any:
    """Load a value stored by `save`; to load a predictor, also pass its classifier.

    A damaged file raises a `StorageError`, and so does a network that differs from the one that the
    predictor was stored with: in its modules, their settings or its weights, except for weights
    that are in the file. Tensors are loaded to the CPU.

    Args:
        path: of the file.
        classifier: the network of a stored predictor.
        weights: "exact" requires the same weights in the same precision, on any device. "rounded"
            also accepts copies of the network in another precision, such as half precision.
    """
    if classifier is not None:
        require_classifier(classifier)
    if not isinstance(weights, str) or weights not in (EXACT, ROUNDED):
        raise ValueError(f"weights must be 'exact' or 'rounded', got {weights!r}")
    stored = disk.read(Path(path))
    kind = str(stored.value.get("kind"))
    is_standalone = issubclass(KINDS.get(kind, object), STANDALONE)
    if classifier is None and not is_standalone:
        raise StorageError(f"{path} holds a {kind}, a predictor: use load(path, classifier)")
    if classifier is not None and is_standalone:
        raise StorageError(f"{path} holds a {kind}, not a predictor: use load(path)")
    try:
        value = decode(stored.value, stored.tensors, partial(_restored, classifier, weights))
    except disk.DAMAGE as error:
        raise StorageError(f"{path} cannot be restored: {error}") from error
    if not isinstance(value, (*STANDALONE, *NEEDS_NETWORK)):
        raise StorageError(f"{path} holds only a {kind}, which acnml.save cannot have written")
    return value


def _restored(
    classifier: Classifier | None,
    weights: Weights,
    *,
    network: Mapping[str, Any] | None,
    overrides: Params,
    temperature: float = 1.0,
    fingerprints: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Classifier:
    """Return the given classifier with the overrides and the temperature of the stored one.

    Files of format 1 have fingerprints instead of a description of the network, the oldest only
    overrides. If the given classifier already has a temperature, it must be the stored one.
    Otherwise the logits would silently be divided by two temperatures.
    """
    if classifier is None:
        raise ValueError("a value that is not a predictor contains a classifier")
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


def _require_one_network(value: Standalone | Predictor | Density) -> None:
    """Raise an error if a predictor has several networks, because `load` takes only one."""
    # Two heads of one module with different get_logits count as two networks.
    networks = {(id(c.model), c._get_logits) for c in _classifiers(value)}
    if len(networks) > 1:
        raise ValueError(
            f"this {type(value).__name__} holds several networks, but a file can hold only one; "
            "save its members one by one and combine them again after loading"
        )


def _classifiers(value: Any) -> list[Classifier]:
    """Return all classifiers inside a value."""
    if isinstance(value, Classifier):
        return [value]
    parts = value if isinstance(value, tuple) else ()
    if isinstance(value, NEEDS_NETWORK) and dataclasses.is_dataclass(value):
        parts = tuple(fields(value).values())
    return [classifier for part in parts for classifier in _classifiers(part)]
