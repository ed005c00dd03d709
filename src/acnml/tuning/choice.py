"""Choice: a value with the table from which it was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final

from acnml._util.markup import html_table


class Row(Protocol):
    """A row of a table: a named tuple of numbers that begins with the hyperparameter's value."""

    @property
    def value(self) -> float:
        """The value of the hyperparameter."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


RowT = TypeVar("RowT", bound=Row)


@final
@dataclass(frozen=True)
class Choice(Generic[RowT]):
    """A chosen value, with the table of all values that were tried.

    >>> from acnml.tuning import Evidence
    >>> print(Choice(0.5, (Evidence(0.1, -12.0), Evidence(0.5, -9.5)), "the largest evidence"))
    0.5: the largest evidence
       value  log_evidence
         0.1      -12.0000
    →    0.5       -9.5000
    """

    value: float
    table: tuple[RowT, ...]
    rule: str  # a description of how the value was chosen

    def __str__(self) -> str:
        return f"{self.value:.6g}: {self.rule}\n{table_text(self.table, self.value)}"

    def _repr_html_(self) -> str:
        """Return the table for notebooks, with the chosen row in bold."""
        head = list(self.table[0]._asdict())
        rows = [_cells(row) for row in self.table]
        chosen = {i for i, row in enumerate(self.table) if row.value == self.value}
        return html_table(head, rows, chosen, [f"{self.value:.6g}: {self.rule}"])


def table_text(table: Sequence[Row], chosen: float | None = None) -> str:
    """Format an aligned table, with an arrow before the chosen row if there is one."""
    lines = [["", *table[0]._asdict()]]
    lines += [["→" if row.value == chosen else "", *_cells(row)] for row in table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cells(row: Row) -> list[str]:
    cells = [
        ("yes" if cell else "no") if isinstance(cell, bool) else f"{cell:.4f}"
        for name, cell in row._asdict().items()
        if name != "value"
    ]
    return [f"{row.value:.6g}", *cells]
