"""Choose the most cautious value of a hyperparameter for a given increase of validation NLL.

The increase is called the price, in nats. A value is more cautious than another if its predictions
are less confident, e.g. a larger α, a higher temperature or a smaller prior precision.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from acnml import metrics
from acnml._util import checks
from acnml.predictors import Predictor
from acnml.solution import UnsolvedError
from acnml.tuning._validation import Validation
from acnml.tuning.choice import Choice, table_text
from acnml.tuning.sweep import MakePredictor, Scores, score, until_unsolved

ROUNDING = 1e-9  # tolerance for rounding errors, so that an NLL equal to its limit is accepted
REFINEMENTS = 3  # maximum number of values to try between two values of the grid
SPENT = 0.95  # stop refining at a value that costs at least this fraction of the price


def most_cautious(values: Sequence[float], nlls: Sequence[float], limit: float) -> float:
    """Return the most cautious value whose validation NLL is at most the limit.

    The result lies between the first value within the limit and the more cautious one before it.
    There, log NLL is interpolated linearly in the logarithm of the value. Methods that are compared
    at the same limit therefore have nearly the same NLL, whatever their grids. The result is
    rounded to four digits.

    Args:
        values: positive values of a hyperparameter, the most cautious first, in increasing or
            decreasing order.
        nlls: their NLLs; infinite if there is no solution for a value.
        limit: the highest acceptable NLL.

    Raises:
        ValueError: if the NLL of every value exceeds the limit.

    >>> most_cautious([1, 10, 100], [0.4, 0.1, 0.1], limit=0.2)
    3.162
    """
    values = _most_cautious_first(values)
    if len(values) != len(nlls):
        raise ValueError(f"{len(values)} values and {len(nlls)} NLLs: pass one NLL for each value")
    if any(math.isnan(nll) for nll in nlls):
        raise ValueError(f"nlls contains NaN: {list(nlls)}; use inf for values without a solution")
    inside = next((i for i, nll in enumerate(nlls) if nll <= limit), None)
    if inside is None:
        raise ValueError(
            f"no value has an NLL of at most {limit:g} (the lowest is {min(nlls):g}); "
            "try less cautious values or raise the limit"
        )
    if inside == 0:
        return values[0]
    above, within = nlls[inside - 1], nlls[inside]
    if math.isinf(above) or within <= 0:  # the logarithm cannot be interpolated
        return values[inside]
    share = math.log(above / limit) / math.log(above / within)
    low, high = sorted(values[inside - 1 : inside + 1])
    interpolated = values[inside - 1] * (values[inside] / values[inside - 1]) ** share
    # Round, so that the choice does not depend on rounding errors of a sum.
    return min(max(float(f"{interpolated:.4g}"), low), high)


def within_price(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    price: float,
    reference: Predictor | float,
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the most cautious value whose validation NLL is at most `price` above a reference.

    A more cautious value lowers the confidence on all inputs. The price limits the resulting
    increase of the NLL on in-distribution data. It applies to any hyperparameter: α, a prior
    precision or a temperature. For example, to choose α at a price of 0.01 nats over the network:

        within_price(
            lambda alpha: Acnml(classifier, posterior, alpha=alpha),
            sorted(tuning.ALPHAS, reverse=True), loader, price=0.01, reference=Map(classifier),
        )

    The values of the grid are tried first, from the least cautious to the first one for which the
    solver finds no solution. Then `most_cautious` proposes up to three values between the last
    value within the price and the first one above it. The chosen value is always one that was
    tried, and it is in the table.

    Args:
        make_predictor: a function from a value to the predictor.
        grid: the values to try, the most cautious first: decreasing for α and temperatures,
            increasing for prior precisions. The wrong order raises an error.
        loader: validation data, with labels; see `sweep` for the number of passes.
        price: the acceptable increase of the NLL in nats, not negative.
        reference: the predictor to compare with, or its validation NLL.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, x[:250])
    >>> validation = [(x[250:], labels[250:])]
    >>> choice = acnml.tuning.within_price(
    ...     lambda alpha: acnml.Acnml(classifier, posterior, alpha=alpha),
    ...     grid=(10.0, 1.0, 0.1, 0.01),  # the most cautious first
    ...     loader=validation,
    ...     price=0.1,
    ...     reference=acnml.Map(classifier),
    ... )
    >>> choice.value > 0
    True
    """
    values = _most_cautious_first(grid)
    if not 0 <= price < math.inf:
        raise ValueError(f"price must be finite and not negative, got {price}")
    _require_reference(reference)
    validation = Validation(loader, progress)

    def evaluate(value: float) -> _Tried:
        log_probs, labels = validation.predictions(make_predictor(value), f"{value:g}")
        confidence = log_probs.double().amax(-1).exp().mean().item()
        return _Tried(score(value, log_probs, labels), confidence)

    tried = until_unsolved(evaluate, values[::-1])[::-1]
    _require_order(tried)
    plain = _nll_of(reference, validation)
    limit = plain + price + ROUNDING
    rows = [one.scores for one in tried]
    meaning = f"within {price:g} nats of the reference NLL {plain:.4f}"
    if not any(row.nll <= limit for row in rows):
        raise ValueError(
            f"no value in the grid is {meaning}; use less cautious values or a higher price\n"
            f"{table_text(_increasing(rows))}"
        )
    enough = plain + SPENT * price
    _refine(rows, enough, limit, lambda value: evaluate(value).scores)
    chosen = next(row.value for row in rows if row.nll <= limit)
    rule = f"the most cautious value {meaning}"
    if chosen == rows[0].value:
        end = (
            "in the grid: try more cautious ones"
            if len(tried) == len(values)
            else "for which the solver finds a solution"
        )
        rule += f"; it is the most cautious one {end}"
    return Choice(chosen, _increasing(rows), rule)


def _refine(
    rows: list[Scores], enough: float, limit: float, evaluate: Callable[[float], Scores]
) -> None:
    """Add values near the limit to `rows`, until an NLL is between `enough` and `limit`."""
    for _ in range(REFINEMENTS):
        value = most_cautious([row.value for row in rows], [row.nll for row in rows], limit)
        if value in {row.value for row in rows}:
            return
        try:
            row = evaluate(value)
        except UnsolvedError:
            return
        rows.insert(next(i for i, other in enumerate(rows) if other.nll <= limit), row)
        if enough <= row.nll <= limit:
            return


class _Tried(NamedTuple):
    """The scores of a value, and the mean confidence of its predictions."""

    scores: Scores
    confidence: float


def _most_cautious_first(grid: Sequence[float]) -> list[float]:
    """Check that the values of a grid are positive and strictly ordered, and return them."""
    if not len(grid):
        raise ValueError("the grid is empty: pass at least one value")
    values = [checks.require_positive(float(value), "every value in the grid") for value in grid]
    if len({a < b for a, b in pairwise(values)}) > 1 or len(set(values)) < len(values):
        raise ValueError(
            "the grid must begin with the most cautious value and then strictly increase or "
            f"decrease, got {values}"
        )
    return values


def _require_order(tried: Sequence[_Tried]) -> None:
    """Raise an error if predictions are more confident at the first value than at the last."""
    first, last = tried[0], tried[-1]
    if first.confidence > last.confidence + ROUNDING:
        raise ValueError(
            "the grid must begin with the most cautious value, but predictions are more confident "
            f"at {first.scores.value:g} (mean {first.confidence:.4f}) than at "
            f"{last.scores.value:g} ({last.confidence:.4f}): reverse the grid"
        )


def _require_reference(reference: Predictor | float) -> None:
    if isinstance(reference, Predictor):
        return
    if not isinstance(reference, numbers.Real):
        kind = type(reference).__name__
        raise TypeError(f"reference must be a predictor such as Map, or its NLL, got a {kind}")
    if not math.isfinite(reference):
        raise ValueError(f"the reference NLL must be finite, got {reference}")


def _nll_of(reference: Predictor | float, validation: Validation) -> float:
    if isinstance(reference, Predictor):
        return metrics.nll(*validation.predictions(reference, "reference"))
    return float(reference)


def _increasing(rows: Iterable[Scores]) -> tuple[Scores, ...]:
    """Return the rows in increasing order of the value."""
    return tuple(sorted(rows, key=lambda row: row.value))
