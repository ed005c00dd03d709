"""Rows of Parquet files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from acnml.scoring.files import Files
from acnml.scoring.job import Reading, ScoringError
from acnml.scoring.sources import TableSource

# Pages are read in pieces of this many bytes, and not ahead. Otherwise whole columns of a row group
# are read, and those of all row groups stay in memory until the file is closed. Every piece from a
# remote file system is a request, so these are larger.
LOCAL_PIECE, REMOTE_PIECE = 2**20, 2**24


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
