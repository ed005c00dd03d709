"""One-dimensional searches: a knob at a price, and the knob where a slope is zero."""

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

# Newton's steps at most. After one so short, what is left is below rounding.
STEPS_OF_NEWTON, PRECISION = 100, 1e-9

# Numbers of a table that are computed with at a time.
CELLS = 2**16

# Steps of the search for two knobs on both sides of the price.
FACTOR = 8.0


class Tried(NamedTuple):
    """A knob and what it costs."""

    knob: float
    cost: float


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
    within, above, knob, step = Tried(0.0, -math.inf), Tried(math.inf, math.inf), start, 0
    while True:
        tried = Tried(knob, cost(knob))
        within, above = (tried, above) if tried.cost <= price else (within, tried)
        is_met = within.cost >= (1 - TOLERANCE) * price
        if is_met or above.knob <= (1 + CLOSE) * within.knob or step == STEPS:
            return within.knob
        if above.knob == math.inf:
            if knob >= LARGEST:
                return LARGEST
            knob, factor = knob * factor, min(factor**2, FACTOR)
        elif within.knob == 0:
            if knob <= SMALLEST:
                return knob
            knob, factor = knob / factor, min(factor**2, FACTOR)
        else:
            knob, step = _between(within, above, price, step), step + 1


def _between(within: Tried, above: Tried, price: float, step: int) -> float:
    """Return a knob between two, by regula falsi on its logarithm; every third step halves."""
    halves = step % 3 == 2 or math.isinf(above.cost)
    share = 0.5 if halves else (price - within.cost) / (above.cost - within.cost)
    return within.knob * (above.knob / within.knob) ** min(max(share, 0.05), 0.95)


def zero_of(falling: Callable[[float], tuple[float, float]]) -> float:
    """Return the knob at which a function is zero that falls from positive to negative values.

    These are Newton's steps on the logarithm of the knob, or halves of an interval where these lead
    out of it.

    Args:
        falling: a function from a knob to a value, and how fast it falls with the logarithm.
    """
    low, high, at = math.log(SMALLEST), math.log(LARGEST), 0.0
    for _ in range(STEPS_OF_NEWTON):
        value, slope = falling(math.exp(at))
        low, high = (at, high) if value > 0 else (low, at)
        step = value / slope if slope > 0 else math.inf
        if min(abs(step), high - low) <= PRECISION:
            at = min(max(at + step, low), high)
            break
        at = at + step if low < at + step < high else (low + high) / 2
    return math.exp(at)


@one_thread()
def least_nll_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the T with the least NLL of softmax(z / T) for logits (N, K) and classes (N,).

    The NLL is convex in 1/T. Its derivative there is the mean of z_y - Σ_k p_k z_k.
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
    rows = rows_in_cache(z)

    def excess(temperature: float) -> tuple[float, float]:
        """Σ_k p_k z_k - z_y: positive as long as predictions are too sure of the likeliest."""
        total = slope = 0.0
        for part, own in zip(z.split(rows), of_label.split(rows), strict=True):
            probs = torch.softmax(part / temperature, dim=-1)
            weighted = probs * part
            mean = weighted.sum(-1)
            total += float((mean - own).sum())
            slope += float((weighted.mul_(part).sum(-1) - mean.square()).sum()) / temperature
        return total / len(z), slope / len(z)

    return zero_of(excess)


def rows_in_cache(table: Tensor) -> int:
    """Return how many rows of a table (N, K) are computed with at a time: new memory is slow."""
    return max(1, CELLS // table.shape[1])
