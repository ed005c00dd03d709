"""Posteriors, curvatures, SWAG states and predictors on disk: safetensors and JSON, no pickle.

A stored value is a tree of frozen dataclasses and named tuples. Its tensors are stored under their
path in the tree ("posterior/mean/fc.weight"), everything else in the JSON header. A predictor is
stored without its network: the user gives the network again when loading. Fingerprints of the
network's tensors detect a network with other weights.
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

FORMAT_VERSION = 1
PRINTED = 10_000  # about how many entries of a tensor its fingerprint is computed from
ROUNDING = 0.02  # above the effect of half precision, below that of training
HEADER = "acnml"  # the key of our JSON in the safetensors metadata

# What can be loaded without a network.
Standalone: TypeAlias = Posterior | Curvature | Swag
STANDALONE = (Posterior, Curvature, Swag)

# All that a file may hold: nothing else is constructed when loading.
KINDS = {
    kind.__name__: kind
    for kind in (
        *(Diagonal, Full, Kronecker, LowRank, FactorBlock, EigenBlock, Affine),
        *(DiagonalCurvature, FullCurvature, KroneckerCurvature, Factors, Swag),
        *(Reference, Gradient, Linearised),
        *(Map, Bma, Acnml, Ensemble, Tempered, McDropout),
        *(Glm, Probit, LogitSampling),
        *(Calibrated, CalibrationRow),
    )
}

# What a damaged header may raise when it is read or rebuilt.
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


@final
class StorageError(ValueError):
    """A file that `load` cannot restore; the message says why."""


def save(value: Standalone | Predictor, path: str | os.PathLike[str]) -> None:
    """Store a posterior, a curvature, a `Swag`, or a predictor without its network.

    The write is atomic: the file is complete, or it is not there.
    """
    if not isinstance(value, (*STANDALONE, Predictor)):
        kind = type(value).__name__
        raise TypeError(
            f"only posteriors, curvatures, Swag and predictors can be stored, got a {kind}"
        )
    if isinstance(value, Swag) and value.updates == 0:
        raise ValueError("the Swag has no weights yet: store it after the first update")
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


# Any, not the union: the caller knows what the file holds, and would have to narrow it every time.
@overload
def load(path: str | os.PathLike[str]) -> Any: ...
@overload
def load(path: str | os.PathLike[str], classifier: Classifier) -> Predictor: ...
def load(path: str | os.PathLike[str], classifier: Classifier | None = None) -> Any:
    """Load what `save` has stored; a predictor needs the classifier that it was stored for.

    The classifier's model must have the same weights as when the predictor was stored, except for
    those that are in the file. Other weights are refused. Tensors are loaded on the CPU.
    """
    if classifier is not None:
        require_classifier(classifier)
    tree, tensors = _read(Path(path))
    kind = str(tree.get("kind"))
    is_standalone = issubclass(KINDS.get(kind, object), STANDALONE)
    if classifier is None and not is_standalone:
        raise StorageError(f"{path} holds a {kind}: load(path, classifier)")
    if classifier is not None and is_standalone:
        raise StorageError(f"{path} holds a {kind}, not a predictor: load(path)")
    try:
        value = _decode(tree, tensors, classifier)
    except DAMAGE as error:
        raise StorageError(f"{path} cannot be restored: {error}") from error
    if not isinstance(value, (*STANDALONE, Predictor)):
        raise StorageError(f"{path} holds a {kind}, which is only a part of what can be stored")
    return value


def _require_one_network(value: Standalone | Predictor) -> None:
    """Refuse a predictor of several networks: only one is given when loading."""
    # Two heads of one module with different get_logits count as two networks.
    networks = {(id(c.model), c._get_logits) for c in _classifiers(value)}
    if len(networks) > 1:
        raise ValueError(
            f"this {type(value).__name__} holds several networks, and a file is for one; "
            "save its members one by one and combine them again after loading"
        )


def _classifiers(value: Any) -> list[Classifier]:
    """All classifiers inside a value."""
    if isinstance(value, Classifier):
        return [value]
    parts = value if isinstance(value, tuple) else ()
    if isinstance(value, Predictor) and dataclasses.is_dataclass(value):
        parts = tuple(_fields(value).values())
    return [classifier for part in parts for classifier in _classifiers(part)]


def _read(path: Path) -> tuple[dict[str, Any], Params]:
    """Return the tree and the tensors of a file, or say what is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StorageError(f"{path} is truncated or not a safetensors file: {error}") from error
    if HEADER not in metadata:
        raise StorageError(f"{path} is a safetensors file, but not one that acnml.save wrote")
    try:
        header = json.loads(metadata[HEADER])
        version, tree = int(header["format_version"]), dict(header["value"])
    except DAMAGE as error:
        raise StorageError(f"{path}: its header is damaged ({error!r})") from error
    if version > FORMAT_VERSION:
        raise StorageError(
            f"{path} has format {version}, this acnml reads up to {FORMAT_VERSION}: upgrade acnml"
        )
    return tree, tensors


def _encode(value: Any, path: str, tensors: Params) -> Any:
    """Turn a value into JSON, leaving its tensors in `tensors` under their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {"tensor": path}
    if isinstance(value, Classifier):
        overrides = _encode(value.overrides, path, tensors)
        return {"kind": "Classifier", "overrides": overrides, "temperature": value.temperature}
    if KINDS.get(type(value).__name__) is type(value):  # not another class of that name
        tree = {"kind": type(value).__name__, **_encode_items(_fields(value), path, tensors)}
        if isinstance(value, Predictor) and "classifier" in tree:
            tree["classifier"]["fingerprints"] = {"map": _fingerprints(value)}
        return tree
    if isinstance(value, Mapping):
        return {"map": _encode_items(value, path, tensors)}
    if isinstance(value, (tuple, list)):
        return list(_encode_items(dict(enumerate(value)), path, tensors).values())
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Real):  # NumPy's as well
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(
        f"cannot store {path or 'a value'} of type {type(value).__name__}, "
        f"only {', '.join(KINDS)}; "
        "save the posterior, if there is one, and construct the rest again after loading"
    )


def _fields(value: Any) -> dict[str, Any]:
    """Return what a stored value is constructed from."""
    if isinstance(value, Swag):
        return {"state": value.state_dict()}
    if isinstance(value, Factors):
        return value._asdict()
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def _encode_items(items: Mapping[Any, Any], path: str, tensors: Params) -> dict[str, Any]:
    prefix = f"{path}/" if path else ""
    return {str(k): _encode(item, f"{prefix}{k}", tensors) for k, item in items.items()}


def _decode(tree: Any, tensors: Params, classifier: Classifier | None) -> Any:
    """Invert `_encode`, with the given classifier in the place of the one that was not stored."""
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
            raise ValueError("it holds a classifier in a place where there cannot be one")
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

    The oldest files have the overrides alone. A classifier that already has a temperature must have
    the stored one: dividing the logits by two temperatures would be a silent error.
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
            f"the predictor was stored with temperature {temperature:g}, the given classifier has "
            f"{classifier.temperature:g}; give a classifier without a temperature"
        )
    return viewed.tempered(temperature)


def _fingerprints(predictor: Any) -> dict[str, list[float]]:
    """Return fingerprints of the network's tensors that the predictor does not replace."""
    posterior = getattr(predictor, "posterior", None)
    statistics = getattr(predictor, "statistics", ())
    own = {*(posterior.mean if posterior else ()), *(statistics[0] if statistics else ())}
    tensors = {n: t for n, t in predictor.classifier.tensors.items() if t.is_floating_point()}
    return {name: _fingerprint(tensor) for name, tensor in tensors.items() if name not in own}


def _fingerprint(tensor: Tensor) -> list[float]:
    """Return a projection of some of its entries on a fixed vector, and the norm of these entries.

    For other weights the projection differs by about the norm, for rounded ones by much less.
    """
    flat = tensor.detach().flatten()
    some = flat[:: 1 + len(flat) // PRINTED].to("cpu", torch.float64)
    fixed = torch.cos(torch.arange(len(some), dtype=torch.float64))
    return [float(some @ fixed), float(some.norm())]


def _require_same(tensor: Tensor, expected: Sequence[float], name: str) -> None:
    """Refuse other weights; the same weights in another floating point type are accepted."""
    found = _fingerprint(tensor)
    if max(abs(f - e) for f, e in zip(found, expected, strict=True)) > ROUNDING * expected[1]:
        raise ValueError(
            f"{name!r} of the given network is not what it was when the file was saved; load the "
            "network's weights first"
        )
