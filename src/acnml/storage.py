"""Save and load posteriors, curvatures, SWAG states and predictors: safetensors, no pickle.

A stored value is a tree of frozen dataclasses and named tuples. Each tensor is stored under its
path in the tree ("posterior/mean/fc.weight"). Everything else is in the JSON header of the file. A
predictor is stored without its network, and the user passes the network again to `load`.
Fingerprints of the network's tensors detect a network with different weights.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util import checks
from acnml._util.params import Params
from acnml.calibration import Calibrated, CalibrationRow
from acnml.classifier import Classifier, require_classifier
from acnml.fitting import (
    Curvature,
    DiagonalCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
    Swag,
)
from acnml.posteriors import Diagonal, EigenBlock, FactorBlock, Full, Kronecker, LowRank, Posterior
from acnml.predictors import (
    Acnml,
    Bma,
    DensityTempered,
    Ensemble,
    Glm,
    LogitSampling,
    Map,
    McDropout,
    Predictor,
    Probit,
    Tempered,
)
from acnml.solvers import Gradient, Linearised, Reference
from acnml.typicality import Density, NearestNeighbours, Place, Reader, Typicality

FORMAT_VERSION = 1
PRINTED = 10_000  # approximate number of a tensor's entries that its fingerprint uses
ROUNDING = 0.02  # tolerance for fingerprints: above half-precision rounding, below training
HEADER = "acnml"  # the key of the JSON header in the safetensors metadata

# Values that can be loaded without a network.
Standalone: TypeAlias = Posterior | Curvature | Swag
STANDALONE = (Posterior, Curvature, Swag)

# Values that are stored without their network.
NEEDS_NETWORK = (Predictor, Density)

# The only classes that a file may contain. Loading constructs no others.
KINDS = {
    kind.__name__: kind
    for kind in (
        *(Diagonal, Full, Kronecker, LowRank, FactorBlock, EigenBlock, Affine),
        *(DiagonalCurvature, FullCurvature, KroneckerCurvature, Factors, Swag),
        *(Reference, Gradient, Linearised),
        *(Map, Bma, Acnml, Ensemble, Tempered, DensityTempered, McDropout),
        *(Glm, Probit, LogitSampling),
        *(Calibrated, CalibrationRow),
        *(Typicality, NearestNeighbours, Reader, Place),
    )
}

# Errors that a damaged header may cause when it is read or decoded.
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


@final
class StorageError(ValueError):
    """Raised when `load` cannot restore a file. The message gives the reason."""


def save(value: Standalone | Predictor | Density, path: str | os.PathLike[str]) -> None:
    """Store a posterior, a curvature, a `Swag`, or a predictor without its network.

    The write is atomic: if it fails, no partial file is left and an existing file is unchanged.
    """
    if not isinstance(value, (*STANDALONE, *NEEDS_NETWORK)):
        kind = type(value).__name__
        raise TypeError(
            f"only posteriors, curvatures, Swag and predictors can be stored, got a {kind}"
        )
    if isinstance(value, Swag) and value.updates == 0:
        raise ValueError("the Swag has not collected any weights: store it after the first update")
    _require_one_network(value)
    tensors: Params = {}
    header = {"format_version": FORMAT_VERSION, "value": _encode(value, "", tensors)}
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {target.parent} does not exist: create it first")
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, draft, metadata={HEADER: json.dumps(header)})
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


# The return type is Any and not a union, because callers would have to narrow a union every time.
@overload
def load(path: str | os.PathLike[str]) -> Any: ...
@overload
def load(path: str | os.PathLike[str], classifier: Classifier) -> Predictor: ...
def load(path: str | os.PathLike[str], classifier: Classifier | None = None) -> Any:
    """Load a value stored by `save`; to load a predictor, also pass its classifier.

    The classifier's model must have the same weights as when the predictor was stored, except for
    weights that are in the file. Different weights raise a `StorageError`. Tensors are loaded to
    the CPU.
    """
    if classifier is not None:
        require_classifier(classifier)
    tree, tensors = _read(Path(path))
    kind = str(tree.get("kind"))
    is_standalone = issubclass(KINDS.get(kind, object), STANDALONE)
    if classifier is None and not is_standalone:
        raise StorageError(f"{path} holds a {kind}, a predictor: use load(path, classifier)")
    if classifier is not None and is_standalone:
        raise StorageError(f"{path} holds a {kind}, not a predictor: use load(path)")
    try:
        value = _decode(tree, tensors, classifier)
    except DAMAGE as error:
        raise StorageError(f"{path} cannot be restored: {error}") from error
    if not isinstance(value, (*STANDALONE, *NEEDS_NETWORK)):
        raise StorageError(f"{path} holds only a {kind}, which acnml.save cannot have written")
    return value


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
        parts = tuple(_fields(value).values())
    return [classifier for part in parts for classifier in _classifiers(part)]


def _read(path: Path) -> tuple[dict[str, Any], Params]:
    """Return the tree and the tensors of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StorageError(f"{path} is truncated or not a safetensors file: {error}") from error
    if HEADER not in metadata:
        raise StorageError(
            f"{path} is a safetensors file, but not one that acnml.save wrote: check the path"
        )
    try:
        header = json.loads(metadata[HEADER])
        version, tree = int(header["format_version"]), dict(header["value"])
    except DAMAGE as error:
        raise StorageError(f"{path} has a damaged header ({error!r}): save it again") from error
    if version > FORMAT_VERSION:
        raise StorageError(
            f"{path} has format {version}, but this version of acnml reads formats up to "
            f"{FORMAT_VERSION}: upgrade acnml"
        )
    return tree, tensors


def _encode(value: Any, path: str, tensors: Params) -> Any:
    """Convert a value to JSON, and add its tensors to `tensors` under their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {"tensor": path}
    if isinstance(value, Classifier):
        overrides = _encode(value.overrides, path, tensors)
        return {"kind": "Classifier", "overrides": overrides, "temperature": value.temperature}
    if KINDS.get(type(value).__name__) is type(value):  # not another class of that name
        tree = {"kind": type(value).__name__, **_encode_items(_fields(value), path, tensors)}
        if isinstance(value, NEEDS_NETWORK) and "classifier" in tree:
            tree["classifier"]["fingerprints"] = {"map": _fingerprints(value)}
        return tree
    if isinstance(value, Mapping):
        return {"map": _encode_items(value, path, tensors)}
    if isinstance(value, (tuple, list)):
        return list(_encode_items(dict(enumerate(value)), path, tensors).values())
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Real):  # including NumPy numbers
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(
        f"cannot store {path or 'a value'} of type {type(value).__name__}; "
        f"supported types are {', '.join(KINDS)}. "
        "Save the posterior, if there is one, and construct the rest again after loading"
    )


def _fields(value: Any) -> dict[str, Any]:
    """Return the arguments from which a stored value is constructed."""
    if isinstance(value, Swag):
        return {"state": value.state_dict()}
    if isinstance(value, Factors):
        return value._asdict()
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def _encode_items(items: Mapping[Any, Any], path: str, tensors: Params) -> dict[str, Any]:
    prefix = f"{path}/" if path else ""
    return {str(k): _encode(item, f"{prefix}{k}", tensors) for k, item in items.items()}


def _decode(tree: Any, tensors: Params, classifier: Classifier | None) -> Any:
    """Invert `_encode`, using the given classifier in place of each stored one."""
    if isinstance(tree, list):
        return tuple(_decode(item, tensors, classifier) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "map" in tree:
        return {key: _decode(item, tensors, classifier) for key, item in tree["map"].items()}
    kind = tree["kind"]
    fields = {k: _decode(v, tensors, classifier) for k, v in tree.items() if k != "kind"}
    if kind == "Classifier":
        if classifier is None:
            raise ValueError("a value that is not a predictor contains a classifier")
        return _restored(classifier, **fields)
    build = Swag.from_state_dict if kind == Swag.__name__ else KINDS[kind]
    return build(**fields)


def _restored(
    classifier: Classifier,
    overrides: Params,
    temperature: float = 1.0,
    fingerprints: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Classifier:
    """Return the given classifier with the overrides and the temperature of the stored one.

    The oldest files contain only the overrides. If the given classifier already has a temperature,
    it must be the stored one. Otherwise the logits would silently be divided by two temperatures.
    """
    viewed = classifier.at(overrides)
    tensors = viewed.tensors
    checks.require_known(fingerprints, list(tensors))
    for name, expected in fingerprints.items():
        _require_same(tensors[name], expected, name)
    if classifier.temperature == temperature:
        return viewed
    if classifier.temperature != 1:
        raise ValueError(
            f"the predictor was stored with temperature {temperature:g}, but the given classifier "
            f"has {classifier.temperature:g}; pass a classifier without a temperature"
        )
    return viewed.tempered(temperature)


def _fingerprints(predictor: Any) -> dict[str, list[float]]:
    """Return fingerprints of those tensors of the network that the predictor does not replace."""
    posterior = getattr(predictor, "posterior", None)
    statistics = getattr(predictor, "statistics", ())
    own = {*(posterior.mean if posterior else ()), *(statistics[0] if statistics else ())}
    tensors = {n: t for n, t in predictor.classifier.tensors.items() if t.is_floating_point()}
    return {name: _fingerprint(tensor) for name, tensor in tensors.items() if name not in own}


def _fingerprint(tensor: Tensor) -> list[float]:
    """Project some entries of a tensor onto a fixed vector; return the projection and their norm.

    For different weights the projection differs by about the norm. For the same weights after
    rounding it differs by much less.
    """
    flat = tensor.detach().flatten()
    some = flat[:: 1 + len(flat) // PRINTED].to("cpu", torch.float64)
    fixed = torch.cos(torch.arange(len(some), dtype=torch.float64))
    return [float(some @ fixed), float(some.norm())]


def _require_same(tensor: Tensor, expected: Sequence[float], name: str) -> None:
    """Raise an error if the weights differ by more than the rounding of half precision."""
    found = _fingerprint(tensor)
    if max(abs(f - e) for f, e in zip(found, expected, strict=True)) > ROUNDING * expected[1]:
        raise ValueError(
            f"{name!r} of the given network differs from when the file was saved; load the "
            "weights that the network had then"
        )
