"""The most cautious value of a knob within a price: so many nats of validation NLL."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from acnml import metrics
from acnml._util import checks
from acnml.predictors import Predictor
from acnml.solvers import UnsolvedError
from acnml.tuning._validation import Validation
from acnml.tuning.choice import Choice, table_text
from acnml.tuning.sweep import MakePredictor, Scores, score, until_unsolved

ROUNDING = 1e-9  # of sums: an NLL that meets its limit exactly is within it
REFINEMENTS = 3  # values between those of the grid that are tried at most
SPENT = 0.95  # of the price: a value that costs this much need not be refined


def most_cautious(values: Sequence[float], nlls: Sequence[float], limit: float) -> float:
    """Return the most cautious value whose validation NLL is at most the limit.

    Between the first value within the limit and the more cautious one before it, log NLL is
    interpolated linearly in the logarithm of the value. So methods that are compared at a limit
    pay the same price, whatever their grids. The result is rounded to four digits.

    Args:
        values: of a knob, positive; the most cautious first, then increasing or decreasing.
        nlls: their NLLs; infinite where a value gives no solution.
        limit: the highest NLL that is accepted. If no value is within it, a ValueError says so.

    >>> most_cautious([1, 10, 100], [0.4, 0.1, 0.1], limit=0.2)
    3.162
    """
    values = _most_cautious_first(values)
    if len(values) != len(nlls):
        raise ValueError(f"{len(values)} values and {len(nlls)} NLLs: give one NLL for each value")
    if any(math.isnan(nll) for nll in nlls):
        raise ValueError(f"an NLL is NaN: {list(nlls)}")
    inside = next((i for i, nll in enumerate(nlls) if nll <= limit), None)
    if inside is None:
        raise ValueError(
            f"no value has an NLL of at most {limit:g}, the least is {min(nlls):g}; "
            "try less cautious values or raise the limit"
        )
    if inside == 0:
        return values[0]
    above, within = nlls[inside - 1], nlls[inside]
    if math.isinf(above) or within <= 0:  # no logarithm to interpolate
        return values[inside]
    share = math.log(above / limit) / math.log(above / within)
    low, high = sorted(values[inside - 1 : inside + 1])
    interpolated = values[inside - 1] * (values[inside] / values[inside - 1]) ** share
    # Rounded, so that the choice does not depend on the last bits of a sum.
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

    Caution lowers the confidence on all inputs. The price says how much of that is acceptable on
    data like the training data, and works for any knob: α, a prior precision, a temperature. To
    choose α with a price of 0.01 nats over the network:

        within_price(
            lambda alpha: Acnml(classifier, posterior, alpha=alpha),
            sorted(tuning.ALPHAS, reverse=True), loader, price=0.01, reference=Map(classifier),
        )

    First the values of the grid are tried, from the least cautious up to the first one for which
    the solver finds no solution. Then up to three values between the two neighbours of the limit
    are tried, placed by `most_cautious`. The chosen value is always in the table: it was tried,
    and it is within the price.

    Args:
        make_predictor: value of the knob -> predictor.
        grid: the values to try, the most cautious first: decreasing for α and temperatures,
            increasing for prior precisions. A grid in the wrong order is refused, which is seen
            by the confidence of the predictions.
        loader: validation data, with labels; see `sweep` for the number of passes.
        price: in nats, not negative.
        reference: a predictor, or the NLL itself.
        progress: show progress bars; by default in a terminal only.
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
            f"no value of the grid is {meaning}; give less cautious values or a higher price\n"
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
            else "with a solution"
        )
        rule += f"; it is the most cautious one {end}"
    return Choice(chosen, _increasing(rows), rule)


def _refine(
    rows: list[Scores], enough: float, limit: float, evaluate: Callable[[float], Scores]
) -> None:
    """Add values between the neighbours of the limit, until an NLL is between `enough` and it."""
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
    """The scores of a value, and the mean probability of the likeliest class."""

    scores: Scores
    confidence: float


def _most_cautious_first(grid: Sequence[float]) -> list[float]:
    """Return the values of a grid, which must be positive and in a strict order."""
    if not len(grid):
        raise ValueError("the grid is empty: give at least one value")
    values = [checks.require_positive(float(value), "a grid's value") for value in grid]
    if len({a < b for a, b in pairwise(values)}) > 1 or len(set(values)) < len(values):
        raise ValueError(
            f"the grid must begin with the most cautious value and then increase or decrease, "
            f"got {values}"
        )
    return values


def _require_order(tried: Sequence[_Tried]) -> None:
    """Refuse a grid in the wrong order: its first value would always be within the price."""
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
        raise TypeError(f"reference must be a predictor such as Map or its NLL, got a {kind}")
    if not math.isfinite(reference):
        raise ValueError(f"the reference NLL must be finite, got {reference}")


def _nll_of(reference: Predictor | float, validation: Validation) -> float:
    if isinstance(reference, Predictor):
        return metrics.nll(*validation.predictions(reference, "reference"))
    return float(reference)


def _increasing(rows: Iterable[Scores]) -> tuple[Scores, ...]:
    """Return a table in the order of all others."""
    return tuple(sorted(rows, key=lambda row: row.value))
