"""Posteriors and predictors on disk: safetensors with a JSON header, no pickle.

A stored value is a tree of frozen dataclasses. Its tensors go into the file under their path in the
tree ("posterior/mean/fc.weight"), everything else into the header. A predictor is stored without
its network, which belongs to the user and is given again when loading.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from acnml.classifier import Classifier
from acnml.dual import Affine
from acnml.params import Params
from acnml.posteriors import Diagonal, EigenBlock, FactorBlock, Kronecker, LowRank, Posterior
from acnml.predictors import Acnml, Bma, Map, Predictor
from acnml.solvers import Reference

FORMAT_VERSION = 1
HEADER = "acnml"  # the key of our JSON in the safetensors metadata

# What a file may hold: nothing else is ever constructed from one.
KINDS = {
    kind.__name__: kind
    for kind in (
        *(Diagonal, Kronecker, LowRank, FactorBlock, EigenBlock, Affine),
        *(Reference,),
        *(Map, Bma, Acnml),
    )
}


class StorageError(ValueError):
    """A file that cannot be read as a posterior or predictor; the message says why."""


def save(value: Posterior | Predictor, path: str | os.PathLike[str]) -> None:
    """Store a posterior, or a predictor without its network.

    The file is complete or not there: it is written beside its place and then moved.
    """
    tensors: Params = {}
    header = {"format_version": FORMAT_VERSION, "value": _encode(value, "", tensors)}
    target = Path(path)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, draft, metadata={HEADER: json.dumps(header)})
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


@overload
def load(path: str | os.PathLike[str]) -> Posterior: ...
@overload
def load(path: str | os.PathLike[str], classifier: Classifier) -> Predictor: ...
def load(
    path: str | os.PathLike[str], classifier: Classifier | None = None
) -> Posterior | Predictor:
    """Load a posterior, or with a classifier the predictor that was stored for such a model."""
    tree, tensors = _read(Path(path))
    holds_posterior = tree.get("kind") in {"Diagonal", "Kronecker", "LowRank"}
    if classifier is None and not holds_posterior:
        raise StorageError(f"{path} holds a {tree.get('kind')}: load(path, classifier)")
    if classifier is not None and holds_posterior:
        raise StorageError(f"{path} holds a posterior, not a predictor: load(path)")
    try:
        value = _decode(tree, tensors, classifier)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{path} cannot be restored: {error}") from error
    assert isinstance(value, (Posterior, Predictor))
    return value


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
    except (ValueError, KeyError, TypeError) as error:
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
        return {"kind": "Classifier", "overrides": _encode(value.overrides, path, tensors)}
    if type(value).__name__ in KINDS:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"kind": type(value).__name__, **_encode_items(fields, path, tensors)}
    if isinstance(value, Mapping):
        return {"map": _encode_items(value, path, tensors)}
    if isinstance(value, (tuple, list)):
        return list(_encode_items(dict(enumerate(value)), path, tensors).values())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"cannot store {path or 'a value'} of type {type(value).__name__}")


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
        assert classifier is not None
        return classifier.at(fields["overrides"])
    return KINDS[kind](**fields)
