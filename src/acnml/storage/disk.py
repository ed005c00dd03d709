"""Files with a checksum: safetensors, a JSON header, and a SHA-256 of all that is in them."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from acnml._util import files
from acnml._util.params import Params

FORMAT_VERSION = 2
FIRST_VERSION = 1  # without a checksum, and with a sample of the network's weights
HEADER = "acnml"  # the key of the JSON header in the safetensors metadata
CHECKSUM = "acnml.checksum"  # the key of the checksum, next to it

# Errors that a damaged header may cause when it is read or decoded.
DAMAGE = (
    *(LookupError, TypeError, ValueError, AttributeError, RuntimeError),
    *(ArithmeticError, AssertionError),
)


@final
class StorageError(ValueError):
    """Raised when a file cannot be written or restored. The message gives the reason.

    >>> import acnml, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "broken.safetensors"
    ...     _ = path.write_bytes(b"not a file of this library")
    ...     try:
    ...         acnml.load(path)
    ...     except acnml.StorageError:
    ...         print("refused")
    refused
    """


class Stored(NamedTuple):
    """The content of a file."""

    value: dict[str, Any]  # the tree
    tensors: Params


def write(path: Path, value: Any, tensors: Params) -> None:
    """Write a tree and its tensors to a file, with a checksum."""
    header = json.dumps({"format_version": FORMAT_VERSION, "value": value})
    metadata = {HEADER: header, CHECKSUM: _checksum(header, tensors)}
    write_file(path, safetensors.torch.save(tensors, metadata))


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
        files.require_regular(path, path.stat().st_mode)  # opening a pipe would wait for a writer
        metadata, tensors = _read_safetensors(path)
    if HEADER not in metadata:
        raise StorageError(
            f"{path} is a safetensors file, but not one that acnml.save wrote: check the path"
        )
    checksum = metadata.get(CHECKSUM)
    if checksum is not None and checksum != _checksum(metadata[HEADER], tensors):
        raise StorageError(
            f"{path} is damaged: its content does not match its checksum; copy or save it again"
        )
    try:
        header = json.loads(metadata[HEADER])
        version, value = header["format_version"], dict(header["value"])
    except DAMAGE as error:
        raise StorageError(f"{path} has a damaged header ({error!r}): save it again") from error
    _require_known_version(path, version, has_checksum=checksum is not None)
    return Stored(value, tensors)


def _require_known_version(path: Path, version: Any, *, has_checksum: bool) -> None:
    if type(version) is not int or not FIRST_VERSION <= version <= FORMAT_VERSION:
        advice = "upgrade acnml" if type(version) is int and version > 0 else "save it again"
        raise StorageError(
            f"{path} has format {version!r}, but this version of acnml reads formats "
            f"{FIRST_VERSION} to {FORMAT_VERSION}: {advice}"
        )
    if has_checksum != (version > FIRST_VERSION):
        raise StorageError(
            f"{path} is damaged: files of format {version} have "
            f"{'no' if has_checksum else 'a'} checksum; copy or save it again"
        )
    if version == FIRST_VERSION:
        warnings.warn(
            f"{path} was written by an older version of acnml: it has no checksum, so damage may "
            "go unnoticed, and only a sample of a network's weights can be compared. Save it again",
            stacklevel=4,
        )


def _read_safetensors(path: Path) -> tuple[Mapping[str, str], Params]:
    try:
        if not _is_unicode(path):
            # Like `write`, this holds the whole file in memory next to the tensors.
            content = path.read_bytes()
            return _metadata(content), safetensors.torch.load(content)
        with safe_open(path, framework="pt") as file:
            # Copies, because the tensors are views of the file: it could still change.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except SafetensorError as error:
        raise StorageError(
            f"{path} is truncated or not a safetensors file ({error}): copy or save it again"
        ) from error


def _is_unicode(path: Path) -> bool:
    """Whether a path is one that safetensors can open; Linux has files with any other bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata in the bytes of a safetensors file, which begin with its JSON header."""
    length = int.from_bytes(content[:8], "little")
    try:
        return dict(json.loads(content[8 : 8 + length]).get("__metadata__", {}))
    except DAMAGE as error:
        raise SafetensorError(f"the header cannot be read: {error}") from error


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
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be {done}: {error.strerror or error}; {files.remedy_for(error)}"
        ) from error
    except ValueError as error:  # of a path, for example with a null character
        raise StorageError(f"{str(path)!r} cannot be {done}: {error}") from error
