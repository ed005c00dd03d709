"""Rows of .npy and .npz files, read piece by piece and not mapped into memory.

A memory map would do for .npy files, but its pages count as memory of the process.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

from acnml.scoring.columns import Array, Column, InputColumns, checked
from acnml.scoring.job import Reading
from acnml.scoring.models import ScoringError
from acnml.scoring.sources import Block, Source, identity_of
from acnml.scoring.tables import require_columns, split_names

ARRAY_NAME = "x"  # of the only array of a .npy file


# Kinds of NumPy types that inputs may have: floating point, integers and booleans.
NUMBERS = "fiub"

# Errors of files that are damaged, encrypted or compressed in a way that Python does not know.
DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError)


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_columns: bool
    offset: int


@final
class ArraySource(Source):
    """Arrays whose first dimension counts rows; the arrays of a .npz file are columns."""

    def __init__(self, root: Path, files: list[Path], reading: Reading) -> None:
        self._root, self._files = root, files
        available = _names(files[0])
        columns = reading.columns or (_only(_headers(files[0], available)),)
        arguments, names = split_names(columns)
        require_columns(names, available, "columns")
        require_columns(reading.carry, available, "carry")
        self._wanted = list(dict.fromkeys([*names, *reading.carry]))
        # Others may be anything: objects, single numbers, even damaged.
        headers = [_headers(file, self._wanted) for file in files]
        first = headers[0]
        self.lengths = tuple(
            _require_alike(file, own, first, self._wanted)
            for file, own in zip(files, headers, strict=True)
        )
        inputs = tuple(_column(name, first[name], reading) for name in names)
        self._inputs = InputColumns(inputs, arguments, reading.stack)
        self._carry = reading.carry
        self.carried = pa.schema([(name, _arrow_type(name, first[name])) for name in self._carry])
        self._open: _Rows | None = None

    def identity(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of every file."""
        return identity_of(self._root, self._files)

    def stretch(self, file: int, row: int) -> int:
        """Return the row itself, or the beginning of a .npz file, which may be compressed."""
        return 0 if self._files[file].suffix.lower() == ".npz" else row

    def blocks(self, file: int, start: int, stop: int, size: int) -> Iterator[Block]:
        """Yield rows `start` to `stop` of a file."""
        if self._open is None or not self._open.is_at(file, start):
            self.close()
            self._open = _Rows(self._files[file], file, start, self._wanted)
        name = self._files[file].relative_to(self._root).as_posix()
        for first in range(start, stop, size):
            arrays = self._open.next(min(size, stop - first))
            rows = np.arange(first, first + min(size, stop - first))
            reads = [
                checked(c, arrays[c.name].reshape(len(rows), *c.shape), np.arange(len(rows)), {})
                for c in self._inputs.columns
            ]
            inputs, kept, reasons = self._inputs.joined(reads)
            carried = pa.table({key: arrays[key] for key in self._carry})
            yield Block(pa.repeat(name, len(rows)), rows, carried, inputs, kept, reasons)

    def close(self) -> None:
        """Close the file that is being read."""
        if self._open is not None:
            self._open.close()
            self._open = None


@final
class _Rows:
    """Reads the rows of all arrays of one file in order, from some row on."""

    def __init__(self, path: Path, file: int, start: int, names: list[str]) -> None:
        self._path, self._file, self._at, self._stack = path, file, start, ExitStack()
        self._streams: dict[str, tuple[IO[bytes], _Header]] = {}
        for name in names:
            stream = self._stack.enter_context(_open_array(path, name, self._stack))
            header = _read_header(stream)
            stream.seek(header.offset + start * _row_bytes(header))
            self._streams[name] = stream, header

    def is_at(self, file: int, row: int) -> bool:
        return (file, row) == (self._file, self._at)

    def next(self, count: int) -> dict[str, Array]:
        """Return the next rows of every array."""
        self._at += count
        return {name: self._read(name, count) for name in self._streams}

    def _read(self, name: str, count: int) -> Array:
        stream, header = self._streams[name]
        wanted = count * _row_bytes(header)
        content = bytearray(wanted)  # arrays of it can be written to, which torch asks for
        view, done = memoryview(content), 0
        while done < wanted:
            try:
                piece = stream.read(wanted - done)
            except DAMAGE as error:
                raise ScoringError(
                    f"array {name!r} of {self._path} is damaged ({error}): copy or save it again"
                ) from error
            if not piece:
                raise ScoringError(
                    f"array {name!r} of {self._path} ends too early: the file is truncated; copy "
                    "or save it again"
                )
            view[done : done + len(piece)] = piece
            done += len(piece)
        array = np.frombuffer(content, header.dtype).reshape(count, *header.shape[1:])
        return array.astype(header.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        self._stack.close()


def _open_array(path: Path, name: str, stack: ExitStack) -> IO[bytes]:
    if path.suffix.lower() == ".npy":
        return path.open("rb")
    archive = stack.enter_context(zipfile.ZipFile(path))
    return archive.open(f"{name}.npy")


def _names(path: Path) -> list[str]:
    """Return the names of all arrays of a file. Other files in an archive are not arrays."""
    if path.suffix.lower() == ".npy":
        return [ARRAY_NAME]
    with _damage(path), zipfile.ZipFile(path) as archive:
        found = [name for name in archive.namelist() if name.endswith(".npy")]
        return [name.removesuffix(".npy") for name in found]


def _headers(path: Path, names: Sequence[str]) -> dict[str, _Header]:
    """Return shapes and types of those arrays of a file that are there."""
    there = set(_names(path))
    with _damage(path), ExitStack() as stack:
        streams = {name: _open_array(path, name, stack) for name in names if name in there}
        return {n: _read_header(stack.enter_context(s)) for n, s in streams.items()}


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ScoringError(f"{path} is damaged or not a NumPy file: {error}") from error


def _read_header(stream: IO[bytes]) -> _Header:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return _Header(tuple(shape), dtype, fortran and len(shape) > 1, stream.tell())


def _require_readable(path: Path, name: str, header: _Header) -> None:
    what = f"array {name!r} of {path}"
    if header.dtype.hasobject:
        raise ScoringError(f"{what} holds Python objects, which are not read; save numbers")
    if not header.shape:
        raise ScoringError(f"{what} is a single number; its first dimension must count rows")
    if header.by_columns:
        raise ScoringError(f"{what} is stored by columns: save np.ascontiguousarray(x) instead")


def _row_bytes(header: _Header) -> int:
    return header.dtype.itemsize * math.prod(header.shape[1:])


def _only(headers: dict[str, _Header]) -> str:
    numbers = [n for n, header in headers.items() if header.shape and header.dtype.kind in NUMBERS]
    tensors = [name for name in numbers if len(headers[name].shape) > 1]
    candidates = tensors or numbers or list(headers)
    if len(candidates) != 1:
        raise ScoringError(
            f"{len(candidates)} arrays could be the input; name the inputs by --columns. There "
            f"are: {', '.join(headers)}"
        )
    return candidates[0]


def _column(name: str, header: _Header, reading: Reading) -> Column:
    stored = header.shape[1:]
    if header.dtype.kind not in NUMBERS:
        raise ScoringError(f"array {name!r} has type {header.dtype}, but inputs are numbers")
    shape = stored if reading.shape is None else reading.shape
    if math.prod(shape) != math.prod(stored):
        raise ScoringError(
            f"array {name!r} has rows of shape {stored}, which cannot become {shape}: check --shape"
        )
    return Column(name, stored, shape, reading.as_float)


def _arrow_type(name: str, header: _Header) -> pa.DataType:
    if len(header.shape) != 1:
        raise ScoringError(
            f"array {name!r} is not a vector, so it cannot be carried over: leave it out of --carry"
        )
    try:
        return pa.from_numpy_dtype(header.dtype.newbyteorder("="))
    except pa.ArrowException as error:
        raise ScoringError(
            f"array {name!r} has type {header.dtype}, which Parquet does not have: leave it out of "
            "--carry, or save it as another type"
        ) from error


def _require_alike(
    path: Path, own: dict[str, _Header], first: dict[str, _Header], wanted: list[str]
) -> int:
    """Return the number of rows, or raise an error if a file differs from the first one."""
    for name in wanted:
        if name not in own:
            raise ScoringError(f"{path} has no array {name!r}, but other files have")
        _require_readable(path, name, own[name])
        if own[name].shape[1:] != first[name].shape[1:] or own[name].dtype != first[name].dtype:
            raise ScoringError(
                f"array {name!r} of {path} has rows of shape {own[name].shape[1:]} and type "
                f"{own[name].dtype}, but {first[name].shape[1:]} and {first[name].dtype} in the "
                "first file"
            )
    lengths = {name: own[name].shape[0] for name in wanted}
    if len(set(lengths.values())) > 1:
        raise ScoringError(f"the arrays of {path} differ in length: {lengths}")
    return next(iter(lengths.values()))
