"""Which columns of a table are inputs of the model, and which are carried over."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from acnml.scoring.columns import Column, InputColumns, can_be_input
from acnml.scoring.job import Reading
from acnml.scoring.models import ScoringError


def input_columns(reading: Reading, first: pa.Table) -> InputColumns:
    """Return the inputs of the model in tables like this one, whose rows show their shapes."""
    arguments, names = split_names(reading.columns or (_only_tensor(first.schema),))
    require_columns(names, first.column_names, "columns")
    found = [
        Column.found(name, whole(first, name), reading.shape, reading.as_float) for name in names
    ]
    return InputColumns(tuple(found), arguments, reading.stack)


def split_names(named: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split "argument=column" into arguments and columns, which are the same by default."""
    pairs = [name.rpartition("=") for name in named]
    return tuple(own or column for own, _, column in pairs), tuple(c for _, _, c in pairs)


def whole(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array."""
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    joined = column.combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def require_columns(names: Sequence[str], available: Sequence[str], what: str) -> None:
    """Raise an error if a column is missing or named twice."""
    missing = [name for name in names if name not in available]
    if missing:
        raise ScoringError(
            f"the input has no column {missing[0]!r}, which {what!r} names; there are: "
            f"{', '.join(available)}"
        )
    if len(set(names)) < len(names):
        raise ScoringError(f"{what!r} names a column twice: {', '.join(names)}")


def _only_tensor(schema: pa.Schema) -> str:
    found = [field.name for field in schema if can_be_input(field.type)]
    if len(found) != 1:
        raise ScoringError(
            f"{len(found) or 'no'} columns hold lists of numbers; name the inputs by `columns` "
            f"(--columns). There are: {', '.join(schema.names)}"
        )
    return found[0]
