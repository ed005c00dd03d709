"""The kinds of input: Parquet files, NumPy arrays, or one image per file."""

from __future__ import annotations

import math
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from glob import escape
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow import fs

from acnml.scoring.columns import ONLY, Array, Column, Read, input_names
from acnml.scoring.files import Files, find_files
from acnml.scoring.functions import load_function
from acnml.scoring.job import Reading, ScoringError, is_uri
from acnml.scoring.sources import Block, Part, Source, Span, TableSource

# Pages are read in pieces of this many bytes, and not ahead. Otherwise whole columns of a row group
# are read, and those of all row groups stay in memory until the file is closed. Every piece from a
# remote file system is a request, so these are larger.
LOCAL_PIECE, REMOTE_PIECE = 2**20, 2**24

# Errors of files that are damaged, encrypted or compressed in a way that Python does not know.
DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError)

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

    def _tables(self, file: int, start: int, size: int, names: list[str]) -> Iterator[pa.Table]:
        begins, skip = self._begins[file], start - self.stretch(file, start)
        groups = [*range(bisect_right(begins, start) - 1, len(begins) - 1)]
        with _opened(self.files, file) as parquet:
            for batch in parquet.iter_batches(size, groups, names, use_threads=False):
                if len(batch) > skip:
                    yield pa.Table.from_batches([batch.slice(skip)])
                skip = max(0, skip - len(batch))


def _opened(files: Files, index: int) -> pq.ParquetFile:
    piece = LOCAL_PIECE if isinstance(files.system, fs.LocalFileSystem) else REMOTE_PIECE
    path = files.paths[index]
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
        named = {name.rpartition("=")[2] for name in reading.columns}
        self._asked = named | set(reading.carry) if named else None
        schemas, lengths = list[pa.Schema](), list[int]()
        for path in map(Path, files.paths):
            arrays = self._arrays(path)
            types = {n: pa.null() if a is None else _type(a, n, path) for n, a in arrays.items()}
            schemas.append(pa.schema(types.items()))
            used = {*input_names(reading, schemas[0])[1], *reading.carry}
            counts = {n: len(a) for n, a in arrays.items() if a is not None and n in used}
            if len(set(counts.values())) > 1:
                raise ScoringError(f"the arrays of {path} differ in length: {counts}")
            lengths.append(max(counts.values(), default=0))
        super().__init__(files, reading, schemas, lengths)

    def stretch(self, file: int, row: int) -> int:
        """Return the row itself, or the beginning of a .npz file, which is read whole."""
        return 0 if self.files.paths[file].suffix.lower() == ".npz" else row

    def _tables(self, file: int, start: int, size: int, names: list[str]) -> Iterator[pa.Table]:
        path = Path(self.files.paths[file])
        found = self._arrays(path)
        for first in range(start, self.lengths[file], size):
            rows = slice(first, first + size)
            yield pa.table({name: _column(found[name], rows, path) for name in names})

    def _arrays(self, path: Path) -> dict[str, Any]:
        """Return the arrays of a file by name; None for those that nobody asked for."""
        try:
            found = np.load(path, mmap_mode="r")
            if isinstance(found, np.ndarray):
                return {ONLY: found}
            with found:
                is_read = {n: self._asked is None or n in self._asked for n in found.files}
                return {name: found[name] if own else None for name, own in is_read.items()}
        except DAMAGE as error:
            raise ScoringError(f"{path} is damaged, or no array of numbers: {error}") from error


def _type(array: Any, name: str, path: Path) -> pa.DataType:
    """Return the type of a column with the rows of an array, or say why it cannot be one."""
    what = f"array {name!r} of {path}"
    shape: tuple[int, ...] = getattr(array, "shape", ())  # a file in a .npz need not be an array
    if not shape or 0 in shape[1:]:
        raise ScoringError(f"{what} has shape {shape}, but its first dimension must count rows")
    if not array.flags.c_contiguous:
        raise ScoringError(f"{what} is stored by columns: save np.ascontiguousarray(x) instead")
    try:
        kind = pa.from_numpy_dtype(array.dtype.newbyteorder("="))
    except pa.ArrowException as error:
        raise ScoringError(f"{what} has type {array.dtype}: save numbers") from error
    return kind if len(shape) == 1 else pa.fixed_shape_tensor(kind, shape[1:])


def _column(array: Array, rows: slice, path: Path) -> pa.Array:
    """Return rows of an array as a column."""
    if isinstance(array, np.memmap):
        # Pages of a map would count as memory of the process, and end it if the file is truncated.
        length, first = math.prod(array.shape[1:]), rows.start
        place = array.offset + first * length * array.itemsize
        count = (min(rows.stop, len(array)) - first) * length
        flat = np.fromfile(path, array.dtype, count, offset=place)
    else:
        flat = array[rows].reshape(-1)
    values = pa.array(flat.astype(array.dtype.newbyteorder("="), copy=False))
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
        self.carried = pa.schema([])
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
        return Block(keys, Read.of({ONLY: values}, reasons))

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
            f"{self.files.root} has no .parquet, .npy and .npz files, and none of its "
            f"{len(self.files.paths):,} files can be decoded as an image; {self.files.name(0)}: "
            f"{self._decoded(0)}"
        )


TABLES: dict[tuple[str, ...], type[ParquetSource | ArraySource]] = {
    (".parquet", ".pq"): ParquetSource,
    (".npy",): ArraySource,
    (".npz",): ArraySource,
}


def open_source(path: str, reading: Reading, output: str | None = None) -> Source:
    """Return the source for a file, a folder, a pattern or a URI, without files of the output."""
    files = find_files(path, output)
    suffixes = {file.suffix.lower() for file in files.paths}
    for own, kind in TABLES.items():
        if suffixes & set(own) and (kind is ParquetSource or not is_uri(path)):
            _require_only(own, files, path)
            _refuse_image_settings(reading)
            return kind(files, reading)
    if is_uri(path):
        raise ScoringError(
            f"{path} has no Parquet files, and nothing else is read from a URI: convert the files "
            "to Parquet, or copy them to a local folder"
        )
    return ImageSource(files, reading)


def _require_only(suffixes: tuple[str, ...], files: Files, path: str) -> None:
    """Raise an error if some files are of another kind that would be left out."""
    others = [file for file in files.paths if file.suffix.lower() not in suffixes]
    if others:
        pattern = Path(escape(path) if Path(path).exists() else path) / f"*{suffixes[0]}"
        raise ScoringError(
            f"{path} has {suffixes[0]} files and others, such as {others[0].name}: move these away "
            f"or, if the files are local, name those to score, for example --input '{pattern}'"
        )


def _refuse_image_settings(reading: Reading) -> None:
    for name in ("transform", "image_size", "image_mode"):
        if getattr(reading, name) != getattr(Reading, name):
            raise ScoringError(f"`{name}` is for folders of images: leave it out")
