"""Rows of .npy and .npz files, read piece by piece and not mapped into memory.

A memory map would do for .npy files, but its pages count as memory of the process.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

from acnml.scoring.columns import input_names
from acnml.scoring.files import Files
from acnml.scoring.job import Reading, ScoringError
from acnml.scoring.sources import TableSource

ARRAY_NAME = "x"  # of the only array of a .npy file

# Kinds of NumPy types that tensors may have: floating point, integers and booleans.
NUMBERS = "fiub"

# Errors of files that are damaged, encrypted or compressed in a way that Python does not know.
DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError)


class _Array(NamedTuple):
    """An array, as its header describes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_columns: bool
    begins: int  # where its numbers begin
    size: int  # of the file or the part of an archive, in bytes

    @property
    def row_bytes(self) -> int:
        """How many bytes a row has."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of a column with its rows."""
        kind = pa.from_numpy_dtype(self.dtype.newbyteorder("="))
        return kind if len(self.shape) == 1 else pa.fixed_shape_tensor(kind, self.shape[1:])

    def why_unreadable(self) -> str | None:
        """Say why the array cannot be a column, if it cannot. Nothing is allocated before this."""
        if self.by_columns:
            return "is stored by columns: save np.ascontiguousarray(x) instead"
        if not self.shape or self.shape[0] < 0 or min(self.shape[1:], default=1) < 1:
            return f"has shape {self.shape}, but its first dimension must count rows of numbers"
        needed = self.begins + self.shape[0] * self.row_bytes
        if needed > self.size:
            return (
                f"needs {needed:,} bytes for its shape {self.shape}, but has {self.size:,}: it is "
                "truncated or damaged; copy or save it again"
            )
        try:
            is_known = len(self.shape) == 1 or self.dtype.kind in NUMBERS
            return None if is_known and self.arrow_type else f"has type {self.dtype}: save numbers"
        except pa.ArrowException:
            return f"has type {self.dtype}, which is not read: save numbers"


@final
class ArraySource(TableSource):
    """Arrays whose first dimension counts rows; the arrays of a .npz file are columns."""

    def __init__(self, files: Files, reading: Reading) -> None:
        asked = {name.rpartition("=")[2] for name in reading.columns} | set(reading.carry)
        schemas, lengths = list[pa.Schema](), list[int]()
        for path in map(Path, files.paths):
            arrays, others = _described(path)
            for name, reason in others.items():  # those that are not used may be anything
                if name in asked or not arrays:
                    raise ScoringError(f"array {name!r} of {path} {reason}")
            schemas.append(pa.schema([(n, array.arrow_type) for n, array in arrays.items()]))
            used = {*input_names(reading, schemas[0])[1], *reading.carry}
            counts = {n: array.shape[0] for n, array in arrays.items() if n in used}
            if len(set(counts.values())) > 1:
                raise ScoringError(f"the arrays of {path} differ in length: {counts}")
            lengths.append(max(counts.values(), default=0))
        super().__init__(files, reading, schemas, lengths)

    def stretch(self, file: int, row: int) -> int:
        """Return the row itself, or the beginning of a .npz file, which may be compressed."""
        return 0 if self.files.paths[file].suffix.lower() == ".npz" else row

    def _tables(self, file: int, start: int, size: int, names: list[str]) -> Iterator[pa.Table]:
        path = Path(self.files.paths[file])
        try:
            with ExitStack() as stack:
                opened = {name: _open(path, name, stack) for name in names}
                for stream, array in opened.values():
                    stream.seek(array.begins + start * array.row_bytes)
                for first in range(start, self.lengths[file], size):
                    count = min(size, self.lengths[file] - first)
                    yield pa.table({name: _rows(*opened[name], count) for name in names})
        except DAMAGE as error:
            raise ScoringError(f"{path} is damaged ({error}): save it again") from error


def _rows(stream: IO[bytes], array: _Array, count: int) -> pa.Array:
    """Return the next rows of an array as a column."""
    content = stream.read(count * array.row_bytes)
    flat = np.frombuffer(content, array.dtype).astype(array.dtype.newbyteorder("="), copy=False)
    if len(array.shape) == 1:
        return pa.array(flat)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(flat), math.prod(array.shape[1:]))
    return pa.ExtensionArray.from_storage(array.arrow_type, lists)


def _described(path: Path) -> tuple[dict[str, _Array], dict[str, str]]:
    """Return the arrays of a file that can be columns, and why its other arrays cannot."""
    names = [ARRAY_NAME]
    if path.suffix.lower() == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                found = [name for name in archive.namelist() if name.endswith(".npy")]
        except DAMAGE as error:
            raise ScoringError(f"{path} is damaged or not a NumPy file: {error}") from error
        names = [name.removesuffix(".npy") for name in found]
    arrays, others = dict[str, _Array](), dict[str, str]()
    for name in names:
        try:
            with ExitStack() as stack:
                array = _open(path, name, stack)[1]
            reason = array.why_unreadable()
        except DAMAGE as error:
            reason = f"is damaged or not a NumPy array: {error}"
        if reason is None:
            arrays[name] = array
        else:
            others[name] = reason
    return arrays, others


def _open(path: Path, name: str, stack: ExitStack) -> tuple[IO[bytes], _Array]:
    """Open an array, and read its header."""
    if path.suffix.lower() == ".npy":
        stream: IO[bytes] = stack.enter_context(path.open("rb"))
        size = path.stat().st_size
    else:
        archive = stack.enter_context(zipfile.ZipFile(path))
        stream = stack.enter_context(archive.open(f"{name}.npy"))
        size = archive.getinfo(f"{name}.npy").file_size
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return stream, _Array(tuple(shape), dtype, fortran and len(shape) > 1, stream.tell(), size)
