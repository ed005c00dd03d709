"""A file that can be verified by itself: safetensors with a JSON header inside.

The header holds the hash of the content and is protected by a hash of its own, so that every change
is detected. `acnml.load` can read the file if it holds a posterior or a curvature. Settings become
JSON that is the same for the same settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import acnml
from acnml.fit.curvature import Curvature
from studies.files import writing

EXACT = 2**53  # up to here every integer is exactly a float


def to_plain(value: Any, what: str = "settings") -> Any:
    """Return the value as plain JSON data: a dataclass becomes {its name: its fields}.

    1 and 1.0 are the same setting, and so are a tuple and a list.

    >>> to_plain({"rates": (1.0, 0.5)})
    {'rates': [1, 0.5]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: to_plain(fields, what)}
    if isinstance(value, Mapping):
        return {_text(key, what): to_plain(item, f"{what}.{key}") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= EXACT else float(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(
        f"{what} is a {type(value).__name__}; only plain data can be kept: numbers, text, tuples, "
        "mappings and dataclasses of them"
    )


def canonical(value: Any, what: str = "settings") -> str:
    """Return the canonical JSON text of the value."""
    return json.dumps(to_plain(value, what), sort_keys=True, separators=(",", ":"))


def digest(*parts: str | bytes | memoryview) -> str:
    """Return the SHA-256 of texts or bytes, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "big"))
        total.update(content)
    return total.hexdigest()


def _text(key: Any, what: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{what} has the key {key!r}; keys must be text")
    return key


RECORD = "acnml.record"  # the key of our JSON in the safetensors metadata
Header = Mapping[str, Any]


@final
@dataclass(frozen=True, eq=False)
class Content:
    """The result of a stage: tensors by name, and facts (plain data) about them.

    Facts are found by the stage, such as a chosen temperature; settings belong to the stage itself.
    Facts hold no times, so that the same content has the same hash.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)  # what `acnml.load` looks for

    @staticmethod
    def of_saved(
        value: acnml.posteriors.Posterior | Curvature, facts: Mapping[str, Any] | None = None
    ) -> Content:
        """Return what `acnml.save` writes of a posterior or a curvature."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved.safetensors"
            with writing(path):
                acnml.save(value, path)
            tensors, metadata = _read(path)
        return Content(tensors, facts or {}, metadata)


class Record(NamedTuple):
    """A file that was read and verified."""

    content: Content
    header: Header


@final
class DamagedError(ValueError):
    """A file that is torn, was changed, or is no record."""


def encode(content: Content, header: Header) -> tuple[Header, bytes]:
    """Return the bytes of a file, and its header: the given one, `facts` and `content_hash`."""
    tensors = {name: _on_disk(tensor) for name, tensor in content.tensors.items()}
    facts = to_plain(content.facts, "facts")
    content_hash = _content_hash(Content(tensors, facts, content.metadata))
    whole = {**to_plain(header, "header"), "facts": facts, "content_hash": content_hash}
    sealed = json.dumps({"header": whole, "seal": digest(canonical(whole))})
    return whole, safetensors.torch.save(tensors, {**content.metadata, RECORD: sealed})


def read_record(path: Path) -> Record:
    """Read and verify a file; a missing one is a FileNotFoundError."""
    tensors, metadata = _read(path)
    header = _header(path, metadata)
    others = {key: text for key, text in metadata.items() if key != RECORD}
    content = Content(tensors, header["facts"], others)
    if _content_hash(content) != header["content_hash"]:
        raise DamagedError(f"{path}: its content does not match the hash in its header")
    return Record(content, header)


def read_header(path: Path) -> Header:
    """Read and verify the header only."""
    with _opened(path) as file:
        return _header(path, file.metadata() or {})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DamagedError(f"{path} is torn or not a safetensors file: {error}") from error


def _header(path: Path, metadata: Mapping[str, str]) -> Header:
    try:
        sealed = json.loads(metadata[RECORD])
        header, seal = sealed["header"], sealed["seal"]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} has no header that can be read: {error!r}") from error
    if digest(canonical(header)) != seal:
        raise DamagedError(f"{path}: its header does not match its hash")
    return header


def _content_hash(content: Content) -> str:
    parts: list[str | memoryview] = [canonical([content.facts, content.metadata], "facts")]
    for name, tensor in sorted(content.tensors.items()):
        parts += [canonical([name, str(tensor.dtype), tuple(tensor.shape)]), _bytes(tensor)]
    return digest(*parts)


def _bytes(tensor: Tensor) -> memoryview:
    """View the memory of a tensor without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _on_disk(tensor: Tensor) -> Tensor:
    # A clone, because two names may share memory, which the format refuses.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
