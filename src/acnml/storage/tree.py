"""Values as trees of JSON data, with their tensors apart: what a file may hold, and how.

A stored value is a tree of frozen dataclasses and named tuples, of known classes. Each tensor is
stored under its path in the tree ("posterior/mean/fc.weight"). A network is not stored, only its
description.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

from torch import Tensor

from acnml._util.params import Params
from acnml.classifier import Classifier
from acnml.storage import network

# The classes that a file may contain, by their names.
Kinds: TypeAlias = Mapping[str, type[Any]]


@final
class Encoder:
    """Converts a value to JSON, and collects its tensors and its networks on the way."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self.tensors: Params = {}
        # Two heads of one module with different get_logits count as two networks.
        self._networks: dict[tuple[int, Callable[[Any], Tensor]], Classifier] = {}
        self._replaced: dict[int, set[str]] = {}  # by the number of the network

    def encode(self, value: Any, path: str = "") -> Any:
        """Convert a value; its tensors are stored under their paths."""
        if isinstance(value, Tensor):
            self.tensors[path] = value.detach().cpu().clone().contiguous()
            return {"tensor": path}
        if isinstance(value, Classifier):
            overrides = self.encode(value.overrides, path)
            tree = {"overrides": overrides, "temperature": value.temperature}
            return {"kind": "Classifier", "index": self._index(value), **tree}
        if self._kinds.get(type(value).__name__) is type(value):  # not another class of that name
            if hasattr(value, "require_current"):
                value.require_current()  # the file would certify the mixture of two networks
            self._note_replaced(value)
            return {"kind": type(value).__name__, **self._items(_fields(value), path)}
        if isinstance(value, Mapping):
            return {"map": self._items(value, path)}
        if isinstance(value, (tuple, list)):
            return list(self._items(dict(enumerate(value)), path).values())
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, numbers.Real):  # including NumPy numbers
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        raise TypeError(
            f"cannot store {path or 'a value'} of type {type(value).__name__}; "
            f"supported types are {', '.join(self._kinds)}. "
            "Save the posterior, if there is one, and construct the rest again after loading"
        )

    def descriptions(self) -> list[dict[str, Any]]:
        """Return descriptions of all networks, in the order in which they first occur."""
        return [
            network.describe(classifier, self._replaced.get(index, ()))
            for index, classifier in enumerate(self._networks.values())
        ]

    def _items(self, items: Mapping[Any, Any], path: str) -> dict[str, Any]:
        prefix = f"{path}/" if path else ""
        return {str(key): self.encode(item, f"{prefix}{key}") for key, item in items.items()}

    def _index(self, classifier: Classifier) -> int:
        identity = id(classifier.model), classifier.get_logits
        self._networks.setdefault(identity, classifier)
        return list(self._networks).index(identity)

    def _note_replaced(self, value: Any) -> None:
        """Note the tensors of a network that the file has; they may be others when it is loaded.

        If several predictors share a network, these are the tensors that all of them replace.
        """
        classifier = _fields(value).get("classifier")
        if isinstance(classifier, Classifier):
            posterior = getattr(value, "posterior", None)
            statistics = getattr(value, "statistics", None)
            names = {*classifier.overrides, *(posterior.mean if posterior else ())}
            names |= {*(statistics[0] if statistics else ())}
            index = self._index(classifier)
            self._replaced[index] = self._replaced.get(index, names) & names


def _fields(value: Any) -> dict[str, Any]:
    """Return the arguments from which a stored value is constructed."""
    if hasattr(value, "from_state_dict"):
        return {"state": value.state_dict()}
    if isinstance(value, tuple):  # a named one
        return value._asdict()  # type: ignore[attr-defined]
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def decode(tree: Any, tensors: Params, kinds: Kinds, restore: Callable[..., Classifier]) -> Any:
    """Invert `Encoder.encode`; `restore` makes a classifier of the fields of a stored one."""

    def decoded(part: Any) -> Any:
        if isinstance(part, list):
            return tuple(map(decoded, part))
        if not isinstance(part, dict):
            return part
        if "tensor" in part:
            return tensors[part["tensor"]]
        if "map" in part:
            return {key: decoded(item) for key, item in part["map"].items()}
        fields = {key: decoded(item) for key, item in part.items() if key != "kind"}
        if part["kind"] == "Classifier":
            return restore(**fields)
        kind: Any = kinds[part["kind"]]
        return getattr(kind, "from_state_dict", kind)(**fields)

    return decoded(tree)
