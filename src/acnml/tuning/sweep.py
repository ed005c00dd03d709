"""Predictions for all data of a loader, scored for every value of a knob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from acnml import metrics
from acnml._util import checks
from acnml.predictors import Predictor
from acnml.solvers import UnsolvedError
from acnml.tuning._validation import Validation

# A knob's value -> the predictor with this value.
MakePredictor: TypeAlias = Callable[[float], Predictor]

T = TypeVar("T")


class Scores(NamedTuple):
    """Scores of a predictor on the validation data."""

    value: float
    accuracy: float
    nll: float
    brier: float
    ece: float


def sweep(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    progress: bool | None = None,
) -> tuple[Scores, ...]:
    """Score the predictor of every value of the grid.

    Predictors that adapt the same last layer share one pass over the loader. All others take one
    pass for each value.

    Args:
        make_predictor: e.g. `lambda samples: Bma(classifier, posterior, int(samples))`.
        grid: the values to try.
        loader: validation data, with labels.
        progress: show progress bars; by default in a terminal only.
    """
    validation = Validation(loader, progress)
    return tuple(
        score(value, *validation.predictions(make_predictor(value), f"{value:g}")) for value in grid
    )


def until_unsolved(evaluate: Callable[[float], T], grid: Sequence[float]) -> list[T]:
    """Evaluate values, the least cautious first, up to the first one without a solution.

    Caution makes the problems of ACNML harder: beyond that value none is expected to be solved. If
    the first value has no solution either, its `UnsolvedError` is raised.
    """
    found: list[T] = []
    for value in grid:
        try:
            found.append(evaluate(value))
        except UnsolvedError:
            if not found:
                raise
            break
    return found


def least_nll(table: Sequence[Scores]) -> float:
    """Return the value with the least NLL, the first of equal ones."""
    return min(table, key=lambda row: row.nll).value


def score(value: float, log_probs: Tensor, labels: Tensor) -> Scores:
    """Score predictions against labels."""
    return Scores(value, **metrics.summary(log_probs, labels))


def increasing(grid: Sequence[float]) -> tuple[float, ...]:
    """Return the values of a grid in increasing order; refuse those that are not positive."""
    if not len(grid):
        raise ValueError("the grid is empty: give at least one value")
    return tuple(sorted(checks.require_positive(float(value), "a grid's value") for value in grid))
