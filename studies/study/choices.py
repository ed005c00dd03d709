"""Choosing a knob from a sweep, and comparing sweeps at equal price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def most_cautious(values: Sequence[float], nlls: Sequence[float], budget: float) -> float:
    """Return the most cautious value whose NLL is within the budget.

    Values come with the most cautious first. Between two that were tried, log NLL is interpolated
    linearly in the logarithm of the value, so that all methods pay the same price and none is lucky
    in the grid. Where none is in budget it is the last, the one closest to the plain network.

    >>> most_cautious([1, 10, 100], [0.4, 0.1, 0.1], budget=0.2)
    3.162
    """
    inside = next((i for i, nll in enumerate(nlls) if nll <= budget), len(values) - 1)
    if inside == 0 or nlls[inside] > budget:
        return values[inside]
    share = math.log(nlls[inside - 1] / budget) / math.log(nlls[inside - 1] / nlls[inside])
    ratio = values[inside] / values[inside - 1]
    return rounded(values[inside - 1] * ratio**share)


def rounded(value: float) -> float:
    """Keep four digits: what is chosen is not to depend on the last bits of a sum."""
    return float(f"{value:.4g}")


def up_to_least(nlls: Sequence[float]) -> int:
    """Return how many values of a sweep, the most cautious first, come up to its least NLL.

    Beyond it the same NLL comes a second time, from too much confidence: a path through both would
    compare caution with overconfidence.
    """
    return min(range(len(nlls)), key=lambda i: nlls[i], default=-1) + 1


def interpolated(path: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the height of a path at x, None outside of it.

    >>> interpolated([(0.0, 1.0), (2.0, 3.0)], 1.0)
    2.0
    """
    for (x0, y0), (x1, y1) in pairwise(path):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None
