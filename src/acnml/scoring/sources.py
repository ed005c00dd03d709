"""Where rows come from: what all kinds of input have in common.

A source has files with a number of rows each. Rows are read block by block, in the order of the
files, so memory does not depend on the size of the input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa

from acnml.scoring.columns import SHOWN, InputColumns, Read, input_names, require_columns
from acnml.scoring.files import Files
from acnml.scoring.job import Reading, ScoringError


class Block(NamedTuple):
    """Consecutive rows of the input."""

    keys: pa.Table  # the file and the row of every row, and the columns that are carried over
    read: Read


class Part(NamedTuple):
    """Rows `start` to `stop` of a file of the input, which become one file of the output."""

    number: int
    file: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"part-{self.number:08d}.parquet"


# Parts that follow each other in a file, without a gap, and are read by the same process.
Unit: TypeAlias = tuple[Part, ...]

Span: TypeAlias = tuple[int, int]  # from which row to which


class Source(ABC):
    """The rows of an input."""

    files: Files
    lengths: Sequence[int]  # rows of every file
    carried: Sequence[str] = ()  # the columns that are carried over

    @final
    def parts(self, rows: int) -> Iterator[Part]:
        """Cut all files into parts of so many rows; the last of a file may have fewer."""
        number = 0
        for file, length in enumerate(self.lengths):
            for start in range(0, length, rows):
                yield Part(number, file, start, min(start + rows, length))
                number += 1

    @final
    def units(self, parts: Iterable[Part]) -> list[Unit]:
        """Join parts of one stretch of a file, because reading cannot begin inside of it."""

        def key(pair: tuple[int, Part]) -> tuple[int, int, int]:
            index, part = pair
            gaps = part.number - index  # as many as before, if the part follows the last one
            return part.file, self.stretch(part.file, part.start), gaps

        return [tuple(p for _, p in unit) for _, unit in groupby(enumerate(parts), key)]

    @final
    def blocks(self, unit: Unit, size: int) -> Iterator[tuple[Part, Block]]:
        """Yield the rows of parts, in blocks of `size` rows and a shorter last one of every part.

        The last one comes only if all files that were read for the part are still the same.
        """
        starts = [(part, row) for part in unit for row in range(part.start, part.stop, size)]
        spans = [(row, min(row + size, part.stop)) for part, row in starts]
        blocks = self._read(unit[0].file, spans)
        for (part, _), (_, stop), block in zip(starts, spans, blocks, strict=True):
            if stop == part.stop:
                self.files.require_unchanged(self._files_of(part))
            yield part, block

    def stretch(self, file: int, row: int) -> int:
        """Return the last row up to `row` at which reading can begin without what is before it."""
        return row

    @abstractmethod
    def _read(self, file: int, spans: Sequence[Span]) -> Iterator[Block]:
        """Yield rows of a file that follow each other, a block for every span."""

    def _files_of(self, part: Part) -> Sequence[int]:
        """Return the indices of the files that the rows of a part are in."""
        return [part.file]


class TableSource(Source):
    """Files of columns."""

    def __init__(
        self, files: Files, reading: Reading, schemas: Sequence[pa.Schema], lengths: Sequence[int]
    ) -> None:
        self.files, self.lengths, self.carried = files, lengths, reading.carry
        some = next((file for file, length in enumerate(lengths) if length), None)
        if some is None:
            raise ScoringError(f"{files.root} has no rows: check --input")
        self.wanted = [*dict.fromkeys([*input_names(reading, schemas[0])[1], *reading.carry])]
        for path, schema in zip(files.paths, schemas, strict=True):
            require_columns(self.wanted, schema.names, str(path))
            for name in self.wanted:
                kind, expected = (each.field(name).type for each in (schema, schemas[0]))
                if kind != expected:
                    raise ScoringError(
                        f"column {name!r} has type {kind} in {path}, but {expected} in "
                        f"{files.paths[0]}: convert one of them"
                    )
        first = next(self._cut(some, [(0, min(SHOWN, lengths[some]))]))
        self._inputs = InputColumns.found(reading, first)

    @abstractmethod
    def _tables(self, file: int, start: int, size: int) -> Iterator[pa.Table]:
        """Yield the `wanted` columns of a file from a row on, in tables of about `size` rows."""

    @final
    def _read(self, file: int, spans: Sequence[Span]) -> Iterator[Block]:
        for (start, stop), table in zip(spans, self._cut(file, spans), strict=True):
            names = pa.repeat(self.files.name(file), stop - start)
            keys = {"file": names, "row": np.arange(start, stop)}
            keys |= {name: table[name] for name in self.carried}
            yield Block(pa.table(keys), self._inputs.read(table))

    def _cut(self, file: int, spans: Sequence[Span]) -> Iterator[pa.Table]:
        """Yield a table for every span."""
        start, stop = spans[0]
        tables, rest = self._tables(file, start, stop - start), list[pa.Table]()
        for start, stop in spans:
            while sum(map(len, rest)) < stop - start:
                table = next(tables, None)
                if table is None:
                    path = self.files.paths[file]
                    raise ScoringError(f"{path} is truncated: copy or save it again")
                rest.append(table)
            joined = pa.concat_tables(rest)
            rest = [joined.slice(stop - start)]
            yield joined.slice(0, stop - start)
