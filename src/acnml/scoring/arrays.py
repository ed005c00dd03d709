"""Rows of .npy and .npz files, read piece by piece and not mapped into memory.

A memory map would do for .npy files, but its pages count as memory of the process.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
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


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


@final
class ArraySource(Source):
    """Arrays whose first dimension counts rows; the arrays of a .npz file are columns."""

    def __init__(self, root: Path, files: list[Path], reading: Reading) -> None:
        self._root, self._files = root, files
        headers = [_headers(file) for file in files]
        first = headers[0]
        arguments, names = split_names(reading.columns or (_only(first),))
        require_columns(names, list(first), "columns")
        require_columns(reading.carry, list(first), "carry")
        self._wanted = list(dict.fromkeys([*names, *reading.carry]))
        self.lengths = tuple(
            _require_alike(file, own, first, self._wanted)
            for file, own in zip(files, headers, strict=True)
        )
        columns = tuple(_column(name, first[name], reading) for name in names)
        self._inputs = InputColumns(columns, arguments, reading.stack)
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
        self._file, self._at, self._stack = file, start, ExitStack()
        self._streams: dict[str, tuple[IO[bytes], _Header]] = {}
        for name in names:
            stream = self._stack.enter_context(_open_array(path, name, self._stack))
            header = _read_header(stream, path, name)
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
            piece = stream.read(wanted - done)
            if not piece:
                raise ScoringError(
                    f"array {name!r} ends too early: the file is truncated; copy or save it again"
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


def _headers(path: Path) -> dict[str, _Header]:
    """Return shapes and types of all arrays of a file."""
    with ExitStack() as stack:
        try:
            names = [ARRAY_NAME]
            if path.suffix.lower() == ".npz":
                with zipfile.ZipFile(path) as archive:
                    names = [name.removesuffix(".npy") for name in archive.namelist()]
            streams = {name: stack.enter_context(_open_array(path, name, stack)) for name in names}
            return {name: _read_header(stream, path, name) for name, stream in streams.items()}
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            if isinstance(error, ScoringError):
                raise
            raise ScoringError(f"{path} is damaged or not a NumPy file: {error}") from error


def _read_header(stream: IO[bytes], path: Path, name: str) -> _Header:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    what = f"array {name!r} of {path}"
    if dtype.hasobject:
        raise ScoringError(f"{what} holds Python objects, which are not read; save numbers")
    if not shape:
        raise ScoringError(f"{what} is a single number; its first dimension must count rows")
    if fortran and len(shape) > 1:
        raise ScoringError(f"{what} is stored by columns: save np.ascontiguousarray(x) instead")
    return _Header(tuple(shape), dtype, stream.tell())


def _row_bytes(header: _Header) -> int:
    return header.dtype.itemsize * math.prod(header.shape[1:])


def _only(headers: dict[str, _Header]) -> str:
    found = [name for name, header in headers.items() if len(header.shape) > 1]
    candidates = found or list(headers)
    if len(candidates) != 1:
        raise ScoringError(
            f"{len(candidates)} arrays could be the input; name the inputs by --columns. There "
            f"are: {', '.join(headers)}"
        )
    return candidates[0]


def _column(name: str, header: _Header, reading: Reading) -> Column:
    stored = header.shape[1:]
    if header.dtype.kind not in "fiub":
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
    return pa.from_numpy_dtype(header.dtype.newbyteorder("="))


def _require_alike(
    path: Path, own: dict[str, _Header], first: dict[str, _Header], wanted: list[str]
) -> int:
    """Return the number of rows, or raise an error if a file differs from the first one."""
    for name in wanted:
        if name not in own:
            raise ScoringError(f"{path} has no array {name!r}, but other files have")
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
