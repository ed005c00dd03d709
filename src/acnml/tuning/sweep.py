"""Predictions for all data of a loader, scored for every value of a knob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from acnml import metrics
from acnml._util import checks
from acnml._util.batches import split_labels
from acnml._util.progress import track
from acnml.predictors import Predictor
from acnml.solvers import UnsolvedError

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
    """Score the predictor of every value of the grid; one pass over the loader for each.

    Args:
        make_predictor: e.g. `lambda samples: Bma(classifier, posterior, int(samples))`.
        grid: the values to try.
        loader: validation data, with labels.
        progress: show progress bars; by default in a terminal only.
    """
    return tuple(
        score(value, *predictions(make_predictor(value), loader, f"{value:g}", progress))
        for value in grid
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


def predictions(
    predictor: Predictor, loader: Iterable[Any], description: str, progress: bool | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N, K) and labels (N,) of all data, on the CPU."""
    parts = []
    for index, batch in enumerate(track(loader, description, progress)):
        try:
            parts.append(_predicted(predictor, batch))
        except (TypeError, ValueError) as error:
            kinds = (UnsolvedError, TypeError, ValueError)
            kind = next(kind for kind in kinds if isinstance(error, kind))
            raise kind(f"batch {index}: {error}") from error
    if not parts:
        raise ValueError("the loader gave no batch; is it empty, or an iterator used up before?")
    log_probs, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return log_probs, labels


def _predicted(predictor: Predictor, batch: Any) -> tuple[Tensor, Tensor]:
    x, labels = split_labels(batch)
    if labels is None:
        raise ValueError("it has no labels: yield (x, y), or a mapping with 'labels'")
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor of integers, got {type(labels).__name__}")
    log_probs = predictor(x)
    metrics.nll(log_probs, labels)  # refuses labels that do not fit, and what is no distribution
    return log_probs.cpu(), labels.cpu().long()


def increasing(grid: Sequence[float]) -> tuple[float, ...]:
    """Return the values of a grid in increasing order; refuse those that are not positive."""
    if not len(grid):
        raise ValueError("the grid is empty: give at least one value")
    return tuple(sorted(checks.require_positive(float(value), "a grid's value") for value in grid))
