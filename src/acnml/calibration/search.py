"""One-dimensional searches on validation data: the temperature of least NLL, a knob at a price."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acnml._util.threads import one_thread

# Knobs and temperatures are searched between these numbers.
SMALLEST, LARGEST = 1e-9, 1e9

# The price is met within this share of it, or after so many steps.
TOLERANCE, STEPS = 0.005, 40

# Newton's steps for a temperature at most, and the last of them: its square is below rounding.
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
    for step in range(STEPS):
        if low.cost >= (1 - TOLERANCE) * price:
            break
        # Regula falsi on the logarithm of the knob; every third step halves the interval.
        share = (price - low.cost) / (high.cost - low.cost)
        share = 0.5 if step % 3 == 2 else min(max(share, 0.05), 0.95)
        middle = _Tried.of(cost, low.knob * (high.knob / low.knob) ** share)
        low, high = (middle, high) if middle.cost <= price else (low, middle)
    return low.knob


class _Tried(NamedTuple):
    knob: float
    cost: float

    @staticmethod
    def of(cost: Callable[[float], float], knob: float) -> _Tried:
        return _Tried(knob, cost(knob))


def _bracket(
    cost: Callable[[float], float], price: float, start: float, factor: float
) -> tuple[_Tried, _Tried]:
    """Return knobs that cost at most the price, and more; the second is infinite if none does."""
    tried = _Tried.of(cost, start)
    if (1 - TOLERANCE) * price <= tried.cost <= price:
        return tried, tried
    if tried.cost > price:
        high = tried
        while tried.cost > price and tried.knob > SMALLEST:
            high, tried = tried, _Tried.of(cost, tried.knob / factor)
            factor = min(factor**2, FACTOR)
        return tried, high
    low = tried
    while tried.cost <= price and tried.knob < LARGEST:
        low, tried = tried, _Tried.of(cost, tried.knob * factor)
        factor = min(factor**2, FACTOR)
    return low, tried if tried.cost > price else _Tried(math.inf, math.inf)
