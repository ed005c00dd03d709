"""One-dimensional searches: the temperature of least NLL, a knob at a price, a largest value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acnml._util.torch_state import one_thread

# Knobs and temperatures are searched between these numbers.
SMALLEST, LARGEST = 1e-9, 1e9

# The price is met within this share of it, or after so many steps.
TOLERANCE, STEPS = 0.005, 40

# Knobs this close, relatively, are the same: the cost jumps between them.
CLOSE = 1e-4

# Newton's steps for a temperature at most. After one so short, what is left is below rounding.
STEPS_OF_NEWTON, PRECISION = 100, 1e-9

# Numbers of a table that are computed with at a time.
CELLS = 2**16

# Steps of the search for two knobs on both sides of the price.
FACTOR = 8.0


@one_thread()
def least_nll_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the T with the least NLL of softmax(z / T) for logits (N, K) and classes (N,).

    The NLL is convex in 1/T. Its derivative there is the mean of z_y - Σ_k p_k z_k, whose root is
    found by Newton's steps, or by halves of an interval where these lead out of it.
    """
    z = logits.double() - logits.double().amax(-1, keepdim=True)
    of_label = z.gather(1, labels.unsqueeze(1)).squeeze(1)
    if bool((of_label == 0).all()):
        raise ValueError(
            "every validation example is predicted correctly, so there is no best temperature: "
            "give more validation data that the network was not trained on, or set temperature=1"
        )
    if float(of_label.mean()) <= float(z.mean()):
        raise ValueError(
            "the labels are no more probable than other classes: check that they belong to the "
            "inputs, and that the classes are in the order of the network's outputs"
        )
    low, high, at = math.log(SMALLEST), math.log(LARGEST), 0.0
    for _ in range(STEPS_OF_NEWTON):
        excess, slope = _excess(z, of_label, math.exp(at))
        # Positive below the optimum: predictions are then too sure of the likeliest class.
        low, high = (at, high) if excess > 0 else (low, at)
        step = excess / slope if slope > 0 else math.inf
        if min(abs(step), high - low) <= PRECISION:
            at = min(max(at + step, low), high)
            break
        at = at + step if low < at + step < high else (low + high) / 2
    return math.exp(at)


def _excess(z: Tensor, of_label: Tensor, temperature: float) -> tuple[float, float]:
    """Return the mean of Σ_k p_k z_k - z_y, and how fast it falls with log T."""
    excess = slope = 0.0
    rows = rows_in_cache(z)
    for part, own in zip(z.split(rows), of_label.split(rows), strict=True):
        probs = torch.softmax(part / temperature, dim=-1)
        weighted = probs * part
        mean = weighted.sum(-1)
        excess += float((mean - own).sum())
        slope += float((weighted.mul_(part).sum(-1) - mean.square()).sum()) / temperature
    return excess / len(z), slope / len(z)


def rows_in_cache(table: Tensor) -> int:
    """Return how many rows of a table (N, K) are computed with at a time: new memory is slow."""
    return max(1, CELLS // table.shape[1])


def largest_at_price(
    cost: Callable[[float], float], price: float, start: float = 1.0, factor: float = FACTOR
) -> float:
    """Return the largest knob, nearly, that costs at most the price; `LARGEST` if all do.

    Args:
        cost: of a knob, in nats. It may fall below 0 at first, but rises in the end.
        price: what the knob may cost.
        start: where the search begins; it ends there if the price is met.
        factor: of its first steps; a small one if the start is close.
    """
    low, high = _bracket(cost, price, start, factor)
    if high.knob > LARGEST:
        return LARGEST
    return _narrowed(cost, price, low, high)


class Tried(NamedTuple):
    """A knob and what it costs."""

    knob: float
    cost: float

    @staticmethod
    def of(cost: Callable[[float], float], knob: float) -> Tried:
        """Try a knob."""
        return Tried(knob, cost(knob))


def _narrowed(cost: Callable[[float], float], price: float, within: Tried, above: Tried) -> float:
    """Return the largest knob found that costs at most the price.

    The search closes in from one knob that does and one that costs more.
    """
    for step in range(STEPS):
        if within.cost >= (1 - TOLERANCE) * price or above.knob <= (1 + CLOSE) * within.knob:
            break
        # Regula falsi on the logarithm of the knob; every third step halves the interval.
        halves = step % 3 == 2 or math.isinf(above.cost)
        share = 0.5 if halves else (price - within.cost) / (above.cost - within.cost)
        share = min(max(share, 0.05), 0.95)
        middle = Tried.of(cost, within.knob * (above.knob / within.knob) ** share)
        within, above = (middle, above) if middle.cost <= price else (within, middle)
    return within.knob


def _bracket(
    cost: Callable[[float], float], price: float, start: float, factor: float
) -> tuple[Tried, Tried]:
    """Return knobs that cost at most the price, and more; the second is infinite if none does."""
    tried = Tried.of(cost, start)
    if (1 - TOLERANCE) * price <= tried.cost <= price:
        return tried, tried
    if tried.cost > price:
        high = tried
        while tried.cost > price and tried.knob > SMALLEST:
            high, tried = tried, Tried.of(cost, tried.knob / factor)
            factor = min(factor**2, FACTOR)
        return tried, high
    low = tried
    while tried.cost <= price and tried.knob < LARGEST:
        low, tried = tried, Tried.of(cost, tried.knob * factor)
        factor = min(factor**2, FACTOR)
    return low, tried if tried.cost > price else Tried(math.inf, math.inf)


def golden_section(
    function: Callable[[float], float], low: float, high: float, precision: float
) -> float:
    """Return where a function with one maximum between two points is largest.

    The interval shrinks by the golden ratio, with one value of the function each time, until it is
    no longer than `precision`.
    """
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > precision:
        if at_a > at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2
