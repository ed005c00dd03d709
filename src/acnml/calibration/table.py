"""The table that a calibration was chosen from, as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

COLUMNS = ("method", "T", "alpha", "accuracy", "NLL", "Brier", "ECE", "confidence", "regret")

# Methods that are no rules.
NETWORK, TEMPERATURE, EQUAL_PRICE = "network", "temperature", "temperature of equal price"


@final
@dataclass(frozen=True)
class CalibrationRow:
    """The scores of one method on the validation data.

    `confidence` is the mean probability of the likeliest class, `regret` the mean of log C(x).
    """

    method: str
    temperature: float
    alpha: float | None
    accuracy: float
    nll: float
    brier: float
    ece: float
    confidence: float
    regret: float | None

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        numbers = (self.accuracy, self.nll, self.brier, self.ece, self.confidence)
        return [
            self.method,
            f"{self.temperature:.3g}",
            "" if self.alpha is None else f"{self.alpha:.4g}",
            *(f"{number:.4f}" for number in numbers),
            "" if self.regret is None else f"{self.regret:.4f}",
        ]


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells in columns, the first aligned on the left and others on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        shown.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(shown)


def as_html(
    head: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool], notes: Sequence[str]
) -> str:
    """Return a table for notebooks, with the chosen rows in bold and the notes below it."""

    def line(tag: str, cells: Sequence[str], bold: bool = False) -> str:
        sides = ["left", *["right"] * (len(cells) - 1)]
        texts = [f"<b>{escape(c)}</b>" if bold else escape(c) for c in cells]
        parts = zip(texts, sides, strict=True)
        return "".join(f'<{tag} style="text-align: {side}">{c}</{tag}>' for c, side in parts)

    lines = zip(rows, chosen, strict=True)
    body = "".join(f"<tr>{line('td', cells, is_chosen)}</tr>" for cells, is_chosen in lines)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><tr>{line('th', head)}</tr>{body}</table>{below}"
