"""Files with a checksum: safetensors, a JSON header, and a SHA-256 of all that is in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from acnml._util import files
from acnml._util.params import Params

FORMAT_VERSION = 4
HEADER = "acnml"  # the key of the JSON header in the safetensors metadata
CHECKSUM = "acnml.checksum"  # the key of the checksum, next to it


@final
class StorageError(ValueError):
    """Raised when a file cannot be written or restored. The message gives the reason.

    >>> issubclass(acnml.storage.StorageError, ValueError)
    True
    """


class Stored(NamedTuple):
    """The content of a file."""

    value: dict[str, Any]  # the tree
    networks: list[dict[str, Any]]  # descriptions
    tensors: Params


def write(path: Path, stored: Stored) -> None:
    """Write a tree and its tensors to a file, with a checksum."""
    content = {"value": stored.value, "networks": stored.networks}
    header = json.dumps({"format_version": FORMAT_VERSION, **content})
    metadata = {HEADER: header, CHECKSUM: _checksum(header, stored.tensors)}
    write_file(path, safetensors.torch.save(stored.tensors, metadata))


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically, or raise a `StorageError`."""
    require_target(path)
    with _storage_errors(path, "written"):
        return files.write_file(path, content)


def require_target(path: Path) -> None:
    """Raise an error early if a file cannot be written because of what is at its path."""
    with _storage_errors(path, "written"):
        try:
            files.require_target(path)
        except FileNotFoundError as error:
            folder = Path(os.path.realpath(path)).parent
            text = f"the folder {folder} does not exist: create it first"
            raise FileNotFoundError(text) from error


def read(path: Path) -> Stored:
    """Read and verify a file."""
    with _storage_errors(path, "read"):
        files.require_regular(path, path.stat().st_mode)  # opening a pipe waits for a writer
        with path.open("rb") as file:  # once: if a save replaces it meanwhile, this is the old one
            content = file.read()
    try:
        tensors = safetensors.torch.load(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    except SafetensorError as error:
        raise StorageError(
            f"{path} is truncated or not a safetensors file ({error}): copy or save it again"
        ) from error
    if HEADER not in metadata:
        raise StorageError(
            f"{path} is a safetensors file, but not one that acnml.save wrote: check the path"
        )
    if metadata.get(CHECKSUM) != _checksum(metadata[HEADER], tensors):
        raise StorageError(
            f"{path} is damaged: its content does not match its checksum; copy or save it again"
        )
    header = json.loads(metadata[HEADER])
    if header["format_version"] != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format {header['format_version']}, but this version of acnml reads format "
            f"{FORMAT_VERSION}: save it again, or use the version of acnml that wrote it"
        )
    return Stored(header["value"], header["networks"], tensors)


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a header and of the names, types, shapes and bytes of tensors."""
    total = hashlib.sha256()
    parts = {name: [str(t.dtype), list(t.shape)] for name, t in sorted(tensors.items())}
    total.update(json.dumps([header, parts]).encode())
    for name in parts:
        total.update(as_bytes(tensors[name]))
    return total.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """View the entries of a tensor on the CPU as bytes, in the order of its indices."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _storage_errors(path: Path, done: str) -> Iterator[None]:
    """Turn errors of the file system into a `StorageError`; a missing file stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be {done}: {error.strerror or error}; {files.remedy_for(error)}"
        ) from error
