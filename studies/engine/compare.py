"""Methods in the rows of a `metrics.csv`: their scores by shift, and how often one is lower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import TypeAlias

from studies.settings import SettingError

Row: TypeAlias = dict[str, str]  # of a CSV file, by column
Scores: TypeAlias = dict[str, float]  # by shift, the mean over seeds


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
