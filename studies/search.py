"""Choosing one knob by the held-out NLL: the largest within a limit, or that of least NLL."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from scipy.optimize import brentq

# Logarithms of knobs that are tried, in ascending order.
LOWEST, HIGHEST, STEPS = -14.0, 8.0, 24
EXACT = 1e-3  # of the logarithm of a chosen knob
STRIDE = 0.5  # of the logarithm, in a search near a value
FAR_ABOVE = 1.0  # nats over a limit; more would not tell the search anything


@final
class Search:
    """The held-out NLL of a method by its knob.

    Knobs are tried in ascending order until the NLL is above a limit, so that no time is lost on
    values that are far too cautious. The NLL need not grow with the knob: the first passage
    through the limit counts.

    Args:
        nll: knob -> held-out NLL; infinite where there is no prediction.
        limit: the highest NLL that will be asked for.
    """

    def __init__(self, nll: Callable[[float], float], limit: float) -> None:
        self._nll = nll
        self._tried: list[tuple[float, float]] = []
        for step in range(STEPS + 1):
            at = LOWEST + (HIGHEST - LOWEST) * step / STEPS
            self._tried.append((at, nll(math.exp(at))))
            if self._tried[-1][1] > limit:
                break

    def least(self, otherwise: float) -> float:
        """Return the tried knob of least NLL; 0 if none is better than another NLL."""
        at, nll = min(self._tried, key=lambda pair: pair[1])
        return math.exp(at) if nll < otherwise else 0.0

    def largest(self, limit: float, exact: float = EXACT) -> float:
        """Return the knob at which the NLL exceeds a limit; 0 if it does everywhere.

        Args:
            limit: at most that of the search.
            exact: how far the logarithm of the knob may be off.
        """
        above = next((i for i, (_, nll) in enumerate(self._tried) if nll > limit), None)
        if above is None:
            return math.exp(self._tried[-1][0])
        if above == 0:
            return 0.0
        ends = self._tried[above - 1][0], self._tried[above][0]

        def excess(at: float) -> float:
            return min(self._nll(math.exp(at)) - limit, FAR_ABOVE)

        return math.exp(brentq(excess, *ends, xtol=exact))


def near(nll: Callable[[float], float], limit: float, start: float, exact: float = EXACT) -> float:
    """Return the knob near `start` at which the NLL exceeds a limit.

    This takes fewer values than `Search` where a similar method's knob is known. If all values are
    below or above the limit, the knob is at an end of the range.
    """

    def excess(at: float) -> float:
        return min(nll(math.exp(at)) - limit, FAR_ABOVE)

    at, stride = math.log(start), STRIDE
    above = excess(at) > 0
    while LOWEST < at < HIGHEST:
        then, at, stride = at, at + (-stride if above else stride), 2 * stride
        if (excess(at) > 0) != above:
            return math.exp(brentq(excess, *sorted((then, at)), xtol=exact))
    return math.exp(at)
