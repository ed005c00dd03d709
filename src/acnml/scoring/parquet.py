"""Rows of Parquet files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any, final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from acnml.scoring.job import Reading
from acnml.scoring.models import ScoringError
from acnml.scoring.sources import SHOWN, Block, Source
from acnml.scoring.tables import input_columns, require_columns, whole

# Pages are read in pieces of this many bytes, and not ahead. Otherwise whole columns of a row group
# are read, and those of all row groups stay in memory until the file is closed. Every piece from a
# remote file system is a request, so these are larger.
LOCAL_PIECE, REMOTE_PIECE = 2**20, 2**24


@final
class ParquetSource(Source):
    """Parquet files with the same columns; names of folders such as "day=3" are columns as well."""

    def __init__(
        self,
        system: fs.FileSystem,
        root: PurePath,
        files: Sequence[PurePath],
        reading: Reading,
    ) -> None:
        self._system, self._root, self._files = system, root, files
        # The first row of every row group, and the number of all rows.
        self._begins = [[0, *accumulate(_row_groups(system, file))] for file in files]
        self.lengths = tuple(begins[-1] for begins in self._begins)
        self._keys = [_keys_of_folders(file.relative_to(root)) for file in files]
        self._schemas = [pq.read_schema(file, filesystem=system) for file in files]
        schema = self._schemas[0]
        for name in self._keys[0]:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        require_columns(reading.carry, schema.names, "carry")
        self.carried = pa.schema([schema.field(name) for name in reading.carry])
        self._inputs = input_columns(reading, self._first_rows())
        self._require_same_columns()
        self._open: _Rows | None = None

    def identity(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of every file."""
        infos = self._system.get_file_info([str(file) for file in self._files])
        names = [file.relative_to(self._root).as_posix() for file in self._files]
        # Some remote file systems have no time of change.
        times = [info.mtime_ns or 0 for info in infos]
        return list(zip(names, (info.size for info in infos), times, strict=True))

    def stretch(self, file: int, row: int) -> int:
        """Return where the row group of a row begins."""
        begins = self._begins[file]
        return begins[bisect_right(begins, row) - 1]

    def blocks(self, file: int, start: int, stop: int, size: int) -> Iterator[Block]:
        """Yield rows `start` to `stop` of a file."""
        if self._open is None or not self._open.is_at(file, start):
            self.close()
            own = set(self._schemas[file].names)
            names = [name for name in self._wanted if name in own]
            parquet = _opened(self._system, self._files[file])
            self._open = _Rows(parquet, file, start, self._begins[file], names, size)
        name = self._files[file].relative_to(self._root).as_posix()
        for first in range(start, stop, size):
            table = self._open.next(min(size, stop - first))
            reads = [column.read(whole(table, column.name)) for column in self._inputs.columns]
            inputs, kept, reasons = self._inputs.joined(reads)
            files = pa.repeat(name, len(table))
            rows = np.arange(first, first + len(table))
            yield Block(files, rows, self._carried_over(table, file), inputs, kept, reasons)

    def close(self) -> None:
        """Close the file that is being read."""
        if self._open is not None:
            self._open.close()
            self._open = None

    @property
    def _wanted(self) -> list[str]:
        return list(dict.fromkeys([*self._inputs.names, *self.carried.names]))

    def _carried_over(self, table: pa.Table, file: int) -> pa.Table:
        for name in self.carried.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.repeat(self._keys[file][name], len(table)))
        return table.select(self.carried.names).cast(self.carried)

    def _first_rows(self) -> pa.Table:
        """Return some rows of the first file that has any."""
        index = next((i for i, length in enumerate(self.lengths) if length), None)
        if index is None:
            raise ScoringError(f"{self._root} has no rows: check --input")
        with _opened(self._system, self._files[index]) as file:
            return pa.Table.from_batches([next(file.iter_batches(SHOWN))])

    def _require_same_columns(self) -> None:
        """Raise an error if a file lacks a column, or has it with another type."""
        first = self._schemas[0]
        for file, keys, schema in zip(self._files, self._keys, self._schemas, strict=True):
            for name in self._wanted:
                if name not in schema.names and name not in keys:
                    raise ScoringError(
                        f"{file} has no column {name!r}, but other files have: leave the "
                        "file out, or add the column"
                    )
                is_column = name in schema.names and name in first.names
                if is_column and schema.field(name).type != first.field(name).type:
                    raise ScoringError(
                        f"column {name!r} has type {schema.field(name).type} in {file}, but "
                        f"{first.field(name).type} in {self._files[0]}: convert one of them"
                    )


@final
class _Rows:
    """Reads the rows of one file in order, from some row on."""

    def __init__(
        self,
        parquet: pq.ParquetFile,
        file: int,
        start: int,
        begins: list[int],
        names: list[str],
        size: int,
    ) -> None:
        group = bisect_right(begins, start) - 1
        self._file, self._at = file, start
        self._parquet = parquet
        self._batches = self._parquet.iter_batches(
            size, row_groups=list(range(group, len(begins) - 1)), columns=names, use_threads=False
        )
        self._rest: list[Any] = []  # record batches that are read, but not yet given out
        self._skip(start - begins[group])

    def is_at(self, file: int, row: int) -> bool:
        return (file, row) == (self._file, self._at)

    def next(self, count: int) -> pa.Table:
        """Return the next rows."""
        while sum(map(len, self._rest)) < count:
            self._rest.append(next(self._batches))
        taken, missing = [], count
        while missing:
            batch = self._rest.pop(0)
            taken.append(batch.slice(0, missing))
            if len(batch) > missing:
                self._rest.insert(0, batch.slice(missing))
            missing -= len(taken[-1])
        self._at += count
        return pa.Table.from_batches(taken)

    def close(self) -> None:
        self._parquet.close()

    def _skip(self, count: int) -> None:
        while count:
            batch = next(self._batches)
            if len(batch) > count:
                self._rest.append(batch.slice(count))
            count -= min(count, len(batch))


def _opened(system: fs.FileSystem, path: PurePath) -> pq.ParquetFile:
    piece = LOCAL_PIECE if isinstance(system, fs.LocalFileSystem) else REMOTE_PIECE
    return pq.ParquetFile(path, filesystem=system, buffer_size=piece, pre_buffer=False)


def _row_groups(system: fs.FileSystem, path: PurePath) -> list[int]:
    """Return the numbers of rows of all row groups."""
    try:
        metadata = pq.read_metadata(path, filesystem=system)
    except pa.ArrowInvalid as error:
        raise ScoringError(f"{path} is not a Parquet file, or damaged: {error}") from error
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def _keys_of_folders(path: PurePath) -> dict[str, str]:
    """Return the columns in the names of folders such as "day=3"."""
    pairs = [folder.split("=", 1) for folder in path.parts[:-1] if "=" in folder]
    return {unquote(name): unquote(value) for name, value in pairs}
