"""Compare two methods of a `metrics.csv`: their mean scores, and how often one is lower."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

from studies.settings import SettingError

Row: TypeAlias = dict[str, str]  # of a CSV file, by column
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


def of_method(rows: Iterable[Row], name: str) -> list[Row]:
    """Return the rows of a method. `rows` should be of one number of inputs.

    Raises:
        SettingError: if there are none, or two of one seed and shift.
    """
    rows = list(rows)
    found = [row for row in rows if row["name"] == name]
    if not found:
        there = "; ".join(sorted({row["name"] for row in rows}))
        raise SettingError(f"no rows of {name!r}; there are {there or 'none at all'}")
    places = Counter((row["seed"], row["shift"]) for row in found)
    for (seed, shift), count in places.items():
        if count > 1:
            raise SettingError(f"{count} rows of {name!r} for seed {seed} at {shift}")
    return found


def by_shift(rows: Iterable[Row], score: str) -> Scores:
    """Return a score by shift: the mean over seeds."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["shift"], []).append(float(row[score]))
    return {shift: fmean(each) for shift, each in values.items()}


def lower(ours: Scores, others: Scores) -> int:
    """Return at how many shifts our score is lower.

    Raises:
        SettingError: if the shifts are not the same.
    """
    if ours.keys() != others.keys():
        raise SettingError("two methods have different shifts")
    return sum(value < others[shift] for shift, value in ours.items())


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
        ours: a method, as in the column `name`.
        others: the same.
        patterns: regular expressions; the shifts that match one are a group.
        inputs: the number of inputs of every shift, column n.
        scores: columns.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["n"] == str(inputs)]

    def found(method: str, score: str, pattern: str) -> Scores:
        at = [row for row in rows if re.search(pattern, row["shift"])]
        if not at:
            raise SettingError(f"{path} has no rows with {inputs} inputs at shifts {pattern!r}")
        return by_shift(of_method(at, method), score)

    for score in scores:
        for pattern in patterns:
            own = found(ours, score, pattern)
            for other in others:
                its = found(other, score, pattern)
                means = fmean(own.values()), fmean(its.values())
                yield Compared(score, pattern, other, *means, lower(own, its), len(own))


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
