"""Columns of a table as arrays, with the reasons why single rows do not fit.

A row is a number, or a list of numbers that is nested to any depth: a tensor. Lists may have fixed
sizes, which are part of the column's type, or any sizes. Then all rows must have the shape of the
first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from acnml.scoring.models import ScoringError

Array = npt.NDArray[Any]

# The name of an only input, which is passed to the model by position.
ONLY = "x"


class Read(NamedTuple):
    """The rows of a column that could be read, and why the others could not."""

    values: Array  # (m, *shape)
    kept: Array  # (m,) which rows they are
    reasons: dict[int, str]  # row -> reason, for all other rows


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
    def found(name: str, column: pa.Array, shape: tuple[int, ...] | None, as_float: bool) -> Column:
        """Return the column as its type and its first rows show it."""
        plain = _without_extension(column)
        _require_numbers(name, plain.type)
        sizes = _fixed_sizes(plain.type)
        if sizes is None and shape is not None and _depth(plain.type) == 1:
            sizes = (math.prod(shape),)
        stored = _first_sizes(name, plain) if sizes is None else sizes
        wanted = _tensor_shape(column.type) or stored if shape is None else shape
        if math.prod(wanted) != math.prod(stored):
            raise ScoringError(
                f"column {name!r} has rows of shape {stored}, which cannot become {wanted}: check "
                "`shape` (--shape)"
            )
        return Column(name, stored, wanted, as_float)

    def read(self, column: pa.Array) -> Read:
        """Return the rows as an array, without those that are null or have another shape."""
        if kinds.is_null(column.type):  # the type of a column without a single value
            nulls = dict.fromkeys(range(len(column)), self._null)
            return Read(np.empty((0, *self.shape), np.float32), np.arange(0), nulls)
        plain, kept, reasons = _without_extension(column), np.arange(len(column)), {}
        for depth, size in enumerate(self.stored):
            lengths = _lengths(plain)
            per_row = math.prod(self.stored[:depth])
            null, wrong = _any(lengths < 0, per_row), _any(lengths != size, per_row)
            for row in np.flatnonzero(wrong):
                is_null = bool(null[row])
                reasons[int(kept[row])] = self._null if is_null else self._wrong_shape
            if wrong.any():
                plain = plain.filter(pa.array(np.repeat(~wrong, per_row)))
                kept = kept[~wrong]
            plain = plain.flatten()
        per_row = math.prod(self.stored)
        if plain.null_count:
            null = _any(plain.is_null().to_numpy(zero_copy_only=False), per_row)
            reasons |= dict.fromkeys(kept[null].tolist(), self._null)
            plain, kept = plain.filter(pa.array(np.repeat(~null, per_row))), kept[~null]
        if kinds.is_null(plain.type):  # lists without a single value
            plain = plain.cast(pa.float32())
        values = plain.to_numpy(zero_copy_only=False)
        return checked(self, values.reshape(len(kept), *self.shape), kept, reasons)

    @property
    def _null(self) -> str:
        return f"column {self.name!r} is null or has null entries"

    @property
    def _wrong_shape(self) -> str:
        return f"column {self.name!r} has another shape than {self.stored}"


def checked(column: Column, values: Array, kept: Array, reasons: dict[int, str]) -> Read:
    """Convert values (m, ...) of a column, and leave out rows that are not finite."""
    if column.as_float and values.dtype.kind in "iub":
        values = values.astype(np.float32)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        fine = np.isfinite(values).reshape(len(values), -1).all(1)
        reason = f"column {column.name!r} has NaN or infinite entries"
        reasons = reasons | dict.fromkeys(kept[~fine].tolist(), reason)
        values, kept = values[fine], kept[fine]
    return Read(values, kept, reasons)


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

    def __post_init__(self) -> None:
        odd = [column.name for column in self.columns if self.stack and column.shape != ()]
        if odd:
            raise ScoringError(f"only columns of numbers can be stacked, but {odd} are lists")

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]

    def joined(self, reads: Sequence[Read]) -> tuple[dict[str, Array], Array, dict[int, str]]:
        """Return inputs by name for the rows that all columns have, these rows, and reasons."""
        reasons: dict[int, str] = {}
        kept = reads[0].kept
        for read in reads:
            reasons = read.reasons | reasons
            if len(read.kept) < len(kept) or reasons:
                kept = np.intersect1d(kept, read.kept, assume_unique=True)
        parts = [
            r.values if len(r.kept) == len(kept) else r.values[np.searchsorted(r.kept, kept)]
            for r in reads
        ]
        if self.stack:
            return {ONLY: np.stack(parts, axis=1)}, kept, reasons
        names = self.arguments if len(parts) > 1 else (ONLY,)
        return dict(zip(names, parts, strict=True)), kept, reasons


def can_be_input(kind: pa.DataType) -> bool:
    """Whether a column of this type is a tensor per row."""
    return _depth(kind) > 0 and _is_number(_value_type(kind))


def _without_extension(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _tensor_shape(kind: pa.DataType) -> tuple[int, ...] | None:
    """Return the shape of Arrow's fixed-shape tensors."""
    if not isinstance(kind, pa.FixedShapeTensorType):
        return None
    if kind.permutation is not None and list(kind.permutation) != list(range(len(kind.shape))):
        raise ScoringError("tensors with a permutation of dimensions are not supported: copy them")
    return tuple(kind.shape)


def _is_list(kind: pa.DataType) -> bool:
    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)


def _value_type(kind: pa.DataType) -> pa.DataType:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    while _is_list(kind):
        kind = kind.value_type
    return kind


def _depth(kind: pa.DataType) -> int:
    kind, depth = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind, 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _is_number(kind: pa.DataType) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind))


def _require_numbers(name: str, kind: pa.DataType) -> None:
    if not _is_number(_value_type(kind)):
        raise ScoringError(
            f"column {name!r} has type {kind}, but inputs are numbers or nested lists of numbers"
        )


def _fixed_sizes(kind: pa.DataType) -> tuple[int, ...] | None:
    """Return the sizes of nested lists, or None if one of them has no fixed size."""
    sizes: list[int] = []
    while _is_list(kind):
        if not kinds.is_fixed_size_list(kind):
            return None
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes)


def _first_sizes(name: str, column: pa.Array) -> tuple[int, ...]:
    """Return the sizes of the nested lists of the first row that is not null."""
    for row in range(len(column)):
        sizes: list[int] = []
        value = column[row]
        while _is_list(value.type) and value.is_valid and len(value.values):
            sizes.append(len(value.values))
            value = value.values[0]
        if not _is_list(value.type):
            return tuple(sizes)
    raise ScoringError(
        f"none of the first {len(column)} rows of column {name!r} shows the shape of an input: "
        "name it by `shape` (--shape)"
    )


def _lengths(lists: pa.Array) -> Array:
    """Return the length of every list, -1 for null."""
    if kinds.is_fixed_size_list(lists.type):
        lengths = np.full(len(lists), lists.type.list_size)
        if lists.null_count:
            lengths[lists.is_null().to_numpy(zero_copy_only=False)] = -1
        return lengths
    return lists.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)


def _any(found: Array, per_row: int) -> Array:
    """Whether something is found anywhere in a row, for `per_row` entries of every row."""
    return np.asarray(found.reshape(-1, per_row).any(1))
