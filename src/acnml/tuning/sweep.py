"""Score predictors on validation data for every value of a hyperparameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from acnml import metrics
from acnml._util import checks
from acnml.predictors import Predictor
from acnml.solution import UnsolvedError
from acnml.tuning._validation import Validation

# A function from the value of a hyperparameter to the predictor with this value.
MakePredictor: TypeAlias = Callable[[float], Predictor]

T = TypeVar("T")


class Scores(NamedTuple):
    """Scores of a predictor on the validation data.

    >>> from acnml.tuning import Scores
    >>> Scores._fields  # a row of the table of a `Choice`
    ('value', 'accuracy', 'nll', 'brier', 'ece')
    """

    value: float  # of the hyperparameter
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
    """Return the scores for every value in the grid.

    `Acnml` predictors whose posterior covers only the last layer share one pass over the loader.
    All others take one pass for each value.

    Args:
        make_predictor: e.g. `lambda samples: Bma(classifier, posterior, int(samples))`.
        grid: the values to try.
        loader: validation data, with labels.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, x[:250])
    >>> validation = [(x[250:], labels[250:])]
    >>> make = lambda alpha: acnml.Acnml(classifier, posterior, alpha=alpha)
    >>> [row.value for row in acnml.tuning.sweep(make, (0.01, 0.1), validation)]
    [0.01, 0.1]
    """
    validation = Validation(loader, progress)
    return tuple(
        score(value, *validation.predictions(make_predictor(value), f"{value:g}")) for value in grid
    )


def until_unsolved(evaluate: Callable[[float], T], grid: Sequence[float]) -> list[T]:
    """Evaluate values, the least cautious first, and stop before the first without a solution.

    More cautious values make the optimisation problems of ACNML harder, so no solution is expected
    beyond that value. If the first value has no solution, its `UnsolvedError` is raised.
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
    """Return the value with the lowest NLL, or the first of them if several tie."""
    return min(table, key=lambda row: row.nll).value


def score(value: float, log_probs: Tensor, labels: Tensor) -> Scores:
    """Score predictions against labels."""
    return Scores(value, **metrics.summary(log_probs, labels))


def increasing(grid: Sequence[float]) -> tuple[float, ...]:
    """Check that the values of a grid are positive and return them in increasing order."""
    try:
        values = [float(value) for value in grid]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            "the grid must be a sequence of numbers; is it in the place of another argument?"
        ) from error
    if not values:
        raise ValueError("the grid is empty: pass at least one value")
    return tuple(
        sorted(checks.require_positive(value, "every value in the grid") for value in values)
    )
