"""Columns of a table as arrays, with the reasons why single rows do not fit.

A row is a number, or a list of numbers that is nested to any depth: a tensor. Lists may have fixed
sizes, which are part of the column's type, or any sizes. Then all rows must have the shape of the
first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from acnml.scoring.job import Reading, ScoringError

Array = npt.NDArray[Any]

# The name of an only input, which is passed to the model by position.
ONLY = "x"

# Rows at the beginning of a table that show the shapes of inputs.
SHOWN = 256


class Read(NamedTuple):
    """The rows of a table as inputs of the model."""

    inputs: dict[str, Array]  # (n, *shape) by name, with anything in rows that do not fit
    reasons: dict[int, str]  # row -> why it does not fit


@final
@dataclass(frozen=True)
class Column:
    """A column that is an input of the model.

    Args:
        name: of the column.
        stored: the sizes of its nested lists, () for numbers.
        shape: of one input, with as many numbers as `stored`.
        as_float: whether integers are converted.
    """

    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    as_float: bool

    @staticmethod
    def found(name: str, column: pa.Array, reading: Reading) -> Column:
        """Return the column as its type and its first rows show it."""
        if _depth(column.type) is None:
            raise ScoringError(
                f"column {name!r} has type {column.type}, but inputs are numbers or nested lists "
                "of numbers"
            )
        is_tensor = isinstance(column.type, pa.FixedShapeTensorType)
        stored = _first_shape(name, column.storage if is_tensor else column)
        shape = reading.shape or (tuple(column.type.shape) if is_tensor else stored)
        if math.prod(shape) != math.prod(stored):
            raise ScoringError(
                f"column {name!r} has rows of shape {stored}, which cannot become {shape}: check "
                "`shape` (--shape)"
            )
        return Column(name, stored, shape, reading.as_float)

    def read(self, column: pa.Array) -> tuple[Array, dict[int, str]]:
        """Return rows as an array, with zeros for those that do not fit, and why they do not."""
        plain = column.storage if isinstance(column, pa.ExtensionArray) else column
        bad: dict[int, str] = {}
        if self._why_not(plain):  # then look at every row
            reasons = [self._why_not(plain.slice(row, 1)) for row in range(len(plain))]
            bad = {row: reason for row, reason in enumerate(reasons) if reason}
            plain = plain.filter(pa.array([not reason for reason in reasons]))
        if not len(plain):  # the type of the column may be null
            return np.zeros((len(bad), *self.shape), np.float32), bad
        for _ in self.stored:
            plain = plain.flatten()
        values = plain.to_numpy(zero_copy_only=False).reshape(-1, *self.shape)
        return self.checked(values, bad)

    def checked(self, fine: Array, bad: dict[int, str]) -> tuple[Array, dict[int, str]]:
        """Put zeros beside rows that are fine, where others are bad, and refuse what is not finite.

        Integers become floating point numbers if that is asked for.
        """
        values = fine.astype(np.float32) if self.as_float and fine.dtype.kind in "iub" else fine
        if bad:
            values = np.zeros((len(fine) + len(bad), *self.shape), values.dtype)
            values[np.setdiff1d(np.arange(len(values)), [*bad])] = fine
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            infinite = ~np.isfinite(values).reshape(len(values), -1).all(1)
            reason = f"column {self.name!r} has NaN or infinite entries"
            bad = bad | dict.fromkeys(infinite.nonzero()[0].tolist(), reason)
        return values, bad

    def _why_not(self, plain: pa.Array) -> str | None:
        """Say why there are rows that are not tensors of the right shape, if there are any."""
        for size in (*self.stored, None):
            if plain.null_count:
                return f"column {self.name!r} is null or has null entries"
            if size is not None:
                if not all(
                    pc.equal(pc.list_value_length(plain), size).to_numpy(zero_copy_only=False)
                ):
                    return f"column {self.name!r} has another shape than {self.stored}"
                plain = plain.flatten()
        return None


@final
@dataclass(frozen=True)
class InputColumns:
    """The columns that are inputs of the model, and how they are passed to it.

    Args:
        columns: the columns.
        arguments: the names by which several inputs are passed.
        stack: whether columns of numbers are joined into one vector per row.
    """

    columns: tuple[Column, ...]
    arguments: tuple[str, ...]
    stack: bool

    @staticmethod
    def found(reading: Reading, first: pa.Table) -> InputColumns:
        """Return the inputs of the model in tables like this one, whose rows show their shapes."""
        arguments, names = input_names(reading, first.schema)
        columns = tuple(Column.found(name, _whole(first, name), reading) for name in names)
        lists = [column.name for column in columns if column.shape != ()]
        if reading.stack and lists:
            raise ScoringError(f"only columns of numbers can be stacked, but {lists} are lists")
        return InputColumns(columns, arguments, reading.stack)

    def read(self, table: pa.Table) -> Read:
        """Return inputs by name, and the rows that do not fit in one of the columns."""
        reads = [column.read(_whole(table, column.name)) for column in self.columns]
        values, reasons = [array for array, _ in reads], dict[int, str]()
        for _, bad in reads:
            reasons = bad | reasons
        if self.stack:
            return Read({ONLY: np.stack(values, axis=1)}, reasons)
        names = self.arguments if len(values) > 1 else (ONLY,)
        return Read(dict(zip(names, values, strict=True)), reasons)


def input_names(reading: Reading, schema: pa.Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments of the model and the columns for them, which are the same by default."""
    pairs = [name.rpartition("=") for name in reading.columns or (_only_input(schema),)]
    names = tuple(column for _, _, column in pairs)
    require_columns(names, schema.names, "the input")
    return tuple(own or column for own, _, column in pairs), names


def require_columns(names: Sequence[str], available: Sequence[str], where: str) -> None:
    """Raise an error if there is none or more than one of a column, or if it is named twice."""
    for name in names:
        if name not in available:
            there = ", ".join(available)
            raise ScoringError(f"{where} has no column {name!r}; there are: {there}")
        if [*available].count(name) > 1:
            raise ScoringError(f"{where} has several columns {name!r}: rename all but one")
        if [*names].count(name) > 1:
            raise ScoringError(f"column {name!r} is named twice: name it once")


def require_free_names(carried: Sequence[str], taken: Sequence[str]) -> None:
    """Raise an error if a column that is carried over has the name of another one."""
    for name in set(carried) & set(taken):
        raise ScoringError(
            f"column {name!r} cannot be carried over, because the output may have one of this "
            "name: rename it, or name the columns to carry by `carry` (--carry)"
        )


def _only_input(schema: pa.Schema) -> str:
    """Return the only column of lists of numbers or, if there are no lists, of numbers."""
    depths = {field.name: _depth(field.type) for field in schema}
    found = [name for name, depth in depths.items() if depth]
    found = found or [name for name, depth in depths.items() if depth == 0]
    if len(found) != 1:
        raise ScoringError(
            f"{len(found) or 'no'} columns could be the input; name the inputs by `columns` "
            f"(--columns). There are: {', '.join(schema.names)}"
        )
    return found[0]


def _whole(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array, without a copy if it is one already."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _depth(kind: pa.DataType) -> int | None:
    """Return how deep lists of numbers are nested, 0 for numbers, and None for anything else."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if kinds.is_fixed_size_list(kind) or kinds.is_list(kind) or kinds.is_large_list(kind):
        inner = _depth(kind.value_type)
        return None if inner is None else inner + 1
    is_number = kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)
    return 0 if is_number else None


def _first_shape(name: str, column: pa.Array) -> tuple[int, ...]:
    """Return the shape of the first row that has one."""
    for row in column:
        with suppress(ValueError):  # lists of different lengths
            value = np.array(row.as_py())
            if value.size and value.ndim == _depth(column.type):
                return value.shape
    raise ScoringError(
        f"none of the first {len(column)} rows of column {name!r} shows the shape of an input: "
        "put a row that has an input first"
    )
