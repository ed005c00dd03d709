"""Search for the minimum of a function of one number."""

from __future__ import annotations

import math
from collections.abc import Callable


def golden_section(
    function: Callable[[float], float], low: float, high: float, precision: float
) -> float:
    """Return where a function with one minimum between two points is least.

    The interval shrinks by the golden ratio, with one value of the function each time, until it is
    no longer than `precision`.
    """
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > precision:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2
