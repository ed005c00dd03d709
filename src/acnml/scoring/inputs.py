"""The kinds of input: Parquet files, NumPy arrays, or one image per file."""

from __future__ import annotations

import math
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import PurePath
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from acnml.scoring.columns import ONLY, Array, Column, Read
from acnml.scoring.files import Files, find_files
from acnml.scoring.functions import load_function
from acnml.scoring.job import Reading, ScoringError
from acnml.scoring.sources import Block, Part, Source, Span, TableSource

# Pages are read in pieces of this many bytes, and not ahead. Otherwise whole columns of a row group
# are read, and those of all row groups stay in memory until the file is closed. Every piece from a
# remote file system is a request, so these are larger.
LOCAL_PIECE, REMOTE_PIECE = 2**20, 2**24

# Errors of files that are damaged, encrypted or compressed in a way that Python does not know, or
# that have no such array.
DAMAGE: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
DAMAGE += (ValueError, KeyError, pa.ArrowException)

# Modes of Pillow with more than 8 bits per channel. Its conversions to "L" and "RGB" clip them.
WIDE = {"I": "32-bit", "F": "floating point"}  # and I;16, I;16B, ...


@final
class ParquetSource(TableSource):
    """Parquet files with the same columns."""

    def __init__(self, files: Files, reading: Reading) -> None:
        self._begins: list[list[int]] = []  # first rows of row groups, and the number of all rows
        schemas = []
        for index in range(len(files.paths)):
            with _opened(files, index) as file:
                groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
                self._begins.append([0, *accumulate(group.num_rows for group in groups)])
                schemas.append(file.schema_arrow)
        super().__init__(files, reading, schemas, [begins[-1] for begins in self._begins])

    def stretch(self, file: int, row: int) -> int:
        """Return where the row group of a row begins."""
        begins = self._begins[file]
        return begins[bisect_right(begins, row) - 1]

    def _tables(self, file: int, start: int, size: int) -> Iterator[pa.Table]:
        begins, skip = self._begins[file], start - self.stretch(file, start)
        groups = [*range(bisect_right(begins, start) - 1, len(begins) - 1)]
        with _opened(self.files, file) as parquet:
            for batch in parquet.iter_batches(size, groups, self.wanted, use_threads=False):
                if len(batch) > skip:
                    yield pa.Table.from_batches([batch.slice(skip)])
                skip = max(0, skip - len(batch))


def _opened(files: Files, index: int) -> pq.ParquetFile:
    path, piece = files.paths[index], LOCAL_PIECE if files.is_local else REMOTE_PIECE
    try:
        return pq.ParquetFile(path, filesystem=files.system, buffer_size=piece, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise ScoringError(f"{path} is not a Parquet file, or damaged: {error}") from error


@final
class ArraySource(TableSource):
    """Arrays whose first dimension counts rows; the arrays of a .npz file are columns.

    If the columns are named, the other arrays of a .npz file are not read and may be anything.
    """

    def __init__(self, files: Files, reading: Reading) -> None:
        named = [name.rpartition("=")[2] for name in reading.columns]
        self._asked = dict.fromkeys([*named, *reading.carry]) if named else None
        shapes = [(table.schema, len(table)) for table in map(self._table, files.paths)]
        super().__init__(files, reading, [each for each, _ in shapes], [rows for _, rows in shapes])

    def stretch(self, file: int, row: int) -> int:
        """Return the row itself, or the beginning of a .npz file, which is read whole."""
        return 0 if self.files.paths[file].suffix.lower() == ".npz" else row

    def _tables(self, file: int, start: int, size: int) -> Iterator[pa.Table]:
        path = self.files.paths[file]
        with _blamed(path):
            arrays = self._arrays(path)
            for first in range(start, self.lengths[file], size):
                rows = {name: _rows(array, path, first, size) for name, array in arrays.items()}
                yield pa.table({name: _column(own) for name, own in rows.items()})

    def _table(self, path: PurePath) -> pa.Table:
        """Return the arrays of a file as columns, without reading those of a .npy file."""
        with _blamed(path):
            return pa.table({n: _column(array) for n, array in self._arrays(path).items()})

    def _arrays(self, path: PurePath) -> dict[str, Array]:
        """Return the arrays of a file by name; that of a .npy file is a map if it can be one."""
        found = np.load(path, mmap_mode="r")
        if isinstance(found, np.ndarray):
            return {ONLY: found if found.flags.c_contiguous else np.load(path)}
        return {name: np.asarray(found[name]) for name in self._asked or found}


@contextmanager
def _blamed(path: PurePath) -> Iterator[None]:
    """Name the file if its arrays cannot be read."""
    try:
        yield
    except DAMAGE as error:
        text = f"{path} is damaged, or has no arrays of numbers whose first dimension counts rows"
        raise ScoringError(f"{text}: {error}") from error


def _rows(array: Array, path: PurePath, start: int, size: int) -> Array:
    """Return rows of an array, copied from its file if it is a map.

    A map would change with the file, and end the process if the file is truncated.
    """
    if not isinstance(array, np.memmap):
        return array[start : start + size]
    row = np.dtype((array.dtype, array.shape[1:]))
    count = min(size, len(array) - start)
    return np.fromfile(path, row, count, offset=array.offset + start * row.itemsize)


def _column(array: Array) -> pa.Array:
    """Return an array as a column, without a copy if its numbers are stored row by row."""
    if not array.ndim or 0 in array.shape[1:]:
        raise ValueError(f"an array has shape {array.shape}")
    values = pa.array(array.astype(array.dtype.newbyteorder("="), "C", copy=False).reshape(-1))
    if array.ndim == 1:
        return values
    lists = pa.FixedSizeListArray.from_arrays(values, math.prod(array.shape[1:]))
    kind = pa.fixed_shape_tensor(values.type, array.shape[1:])
    return pa.ExtensionArray.from_storage(kind, lists)


@final
class ImageSource(Source):
    """All files below a folder, in the order of their names; those that are no images are rejected.

    The content decides, not the suffix.
    """

    def __init__(self, files: Files, reading: Reading) -> None:
        if reading.columns or reading.carry or reading.stack:
            raise ScoringError("images have no columns: leave out --columns, --stack and --carry")
        self.files, self.lengths, self._reading = files, [len(files.paths)], reading
        named = reading.transform
        self._transform = None if named is None else load_function(named, "--transform")
        shape = reading.shape or self._first_shape()
        self._column = Column("image", shape, shape, as_float=True)

    def _files_of(self, part: Part) -> Sequence[int]:
        return range(part.start, part.stop)

    def _read(self, file: int, spans: Sequence[Span]) -> Iterator[Block]:
        return (self._block(range(start, stop)) for start, stop in spans)

    def _block(self, rows: range) -> Block:
        arrays, reasons, shape = list[Array](), dict[int, str](), self._column.shape
        for index, row in enumerate(rows):
            found = self._decoded(row)
            if isinstance(found, str):
                reasons[index] = found
            elif found.shape != shape:
                reasons[index] = f"the image has shape {found.shape}, not {shape}"
            else:
                arrays.append(found)
        values = np.stack(arrays) if arrays else np.zeros((0, *shape), np.float32)
        values, reasons = self._column.checked(values, reasons)
        keys = pa.table({"file": [self.files.name(row) for row in rows], "row": np.array(rows)})
        return Block(keys, Read({ONLY: values}, reasons))

    def _decoded(self, index: int) -> Array | str:
        """Return an image as an array, or say why it cannot be decoded."""
        try:
            with Image.open(self.files.paths[index]) as file:
                depth = "16-bit" if file.mode.startswith("I;16") else WIDE.get(file.mode)
                if depth is not None and self._transform is None:
                    return f"{depth} image: pass --transform with a function that scales it"
                image = file.copy() if depth else file.convert(self._reading.image_mode)
        except Exception as error:  # decoders raise many kinds of errors for damaged files
            return f"the image cannot be decoded: {type(error).__name__}"
        if self._reading.image_size is not None:
            height, width = self._reading.image_size
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self._transform is not None:
            return np.asarray(self._transform(image))
        pixels = np.asarray(image, dtype=np.float32) / 255
        return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)

    def _first_shape(self) -> tuple[int, ...]:
        """Return the shape of inputs: that of the first image that can be decoded."""
        for index in range(len(self.files.paths)):
            found = self._decoded(index)
            if not isinstance(found, str):
                return found.shape
        raise ScoringError(
            f"{self.files.root} has no .parquet, .npy and .npz files, and none of its files can be "
            f"decoded as an image; {self.files.name(0)}: {self._decoded(0)}"
        )


TABLES: dict[str, type[ParquetSource | ArraySource]] = {
    ".parquet": ParquetSource,
    ".pq": ParquetSource,
    ".npy": ArraySource,
    ".npz": ArraySource,
}


def open_source(path: str, reading: Reading, output: str | None = None) -> Source:
    """Return the source for a file, a folder, a pattern or a URI, without files of the output."""
    files = find_files(path, output)
    suffixes = [file.suffix.lower() for file in files.paths]
    known = next((suffix for suffix in TABLES if suffix in suffixes), None)
    if not files.is_local and known not in (".parquet", ".pq"):
        raise ScoringError(
            f"{path} has no Parquet files, and nothing else is read from another machine: convert "
            "the files to Parquet, or copy them to a local folder"
        )
    if known is None:
        return ImageSource(files, reading)
    for file, suffix in zip(files.paths, suffixes, strict=True):
        if suffix != known:
            raise ScoringError(
                f"{path} has {known} files and others, such as {file.name}: move these away, or "
                f"name those to score by a pattern such as '*{known}'"
            )
    for name in ("transform", "image_size", "image_mode"):
        if getattr(reading, name) != getattr(Reading, name):
            raise ScoringError(f"`{name}` is for folders of images: leave it out")
    return TABLES[known](files, reading)
