"""Compare two methods of a `metrics.csv`: their mean scores, and how often one is lower."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

from studies.settings import SettingError

KEY = ("method", "posterior", "solver", "knob")
Scores: TypeAlias = dict[str, float]  # by shift, the mean over seeds


class Compared(NamedTuple):
    """The means of a score over some shifts, and the number of shifts where ours is lower."""

    score: str
    shifts: str  # the pattern
    other: str
    ours_mean: float
    other_mean: float
    lower: int
    of: int


def compare(
    path: Path,
    ours: str,
    others: Sequence[str],
    patterns: Sequence[str],
    inputs: int,
    scores: Sequence[str],
) -> Iterator[Compared]:
    """Compare a method with others, for every score and every group of shifts.

    Args:
        path: a `metrics.csv` of a study.
        ours: a method as in its columns, "method/posterior/solver/knob"; empty cells at the end may
            be left out.
        others: the same.
        patterns: regular expressions; the shifts that match one are a group.
        inputs: the number of inputs of every shift, column n.
        scores: columns.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["n"] == str(inputs)]

    def found(method: str, score: str, pattern: str) -> Scores:
        cells = (method.split("/") + [""] * len(KEY))[: len(KEY)]
        values: dict[str, list[float]] = {}
        for row in rows:
            if [row[name] for name in KEY] == cells and re.search(pattern, row["shift"]):
                values.setdefault(row["shift"], []).append(float(row[score]))
        if not values:
            there = sorted({"/".join(row[name] for name in KEY).rstrip("/") for row in rows})
            raise SettingError(
                f"{path} has no rows of {method!r} with {inputs} inputs at shifts {pattern!r}; "
                f"with so many inputs it has {', '.join(there) or 'nothing'}"
            )
        return {shift: fmean(each) for shift, each in values.items()}

    for score in scores:
        for pattern in patterns:
            own = found(ours, score, pattern)
            for other in others:
                its = found(other, score, pattern)
                if own.keys() != its.keys():
                    raise SettingError(f"{ours!r} and {other!r} have different shifts")
                lower = sum(value < its[shift] for shift, value in own.items())
                means = fmean(own.values()), fmean(its.values())
                yield Compared(score, pattern, other, *means, lower, len(own))


def as_markdown(compared: Sequence[Compared]) -> str:
    """Return a table."""
    head = ("score", "shifts", "other", "mean of ours", "mean of other", "ours is lower at")
    rows = [
        (
            each.score,
            f"`{each.shifts}`",
            each.other,
            f"{each.ours_mean:.3f}",
            f"{each.other_mean:.3f}",
            f"{each.lower} of {each.of}",
        )
        for each in compared
    ]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
