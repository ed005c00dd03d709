"""Damped Newton steps for many logistic regressions at once, and what to do where no maximum is.

**Step sizes.** For a direction that changes the logits of no point by more than R (differences
between classes), the third derivative of the objective along it is at most R times the second:
logistic regression is generalised self-concordant (Bach 2010). A step of the size log(1 + R) / R
then always improves the objective, and tends to the full Newton step as R → 0 (Sun & Tran-Dinh
2019). So near the maximum no search is needed, whose comparisons rounding would spoil; far from it
a longer step is tried first. R also measures what is left to do: unlike the gradient it does not
vanish where weights run away to infinity.

**No finite maximum.** Without a penalty, separable data have none: the likelihood rises for ever
along some direction. Three cases:

- A direction without penalty along which every point has its own label on top. The likelihood tends
  to 1 and the probability at every point with it: the limit is known exactly. Such a direction is
  found for certain: once Σ_i log p(y_i|x_i) > -log 2, every p(y_i|x_i) is above one half, and the
  weights themselves are the proof.
- Only some points can be pulled apart for ever, the others hold each other (quasi-separation). The
  limit of the maximum with a small ridge, as the ridge vanishes, is the limit of the likelihood's
  maximisers: their probabilities converge though the weights do not. It is followed down to a ridge
  of 1e-11. The error is proportional to the ridge, so the last change tells what is left.
- A query that differs from all data in a direction that nothing holds: treated where queries enter,
  in `refit`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acnml.exact.rows import Rows, Step

TOLERANCE = 1e-8  # of the last step, in logits; what is left after it is of the order of its square
STEPS = 200
PROOF = -0.5 * math.log(2)  # a log-likelihood above -log 2 proves separation; the rest is rounding

NEAR = 0.5  # steps smaller than this, in logits, are damped without a search
SHARE = 0.1  # of the gain promised to first order that a longer step must keep

RIDGES = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11)
RIDGE_TOLERANCE = 1e-4  # so small a ridge leaves no more digits of logits that run away
SETTLED = 1e-6  # largest change of a probability still to come that counts as converged


class Optimum(NamedTuple):
    """What was found for every row."""

    weights: Tensor  # V (R, m, r); where there is no maximum, the last point of the way to it
    residual: Tensor  # (R,) the last Newton step in logits; what is left along the ridges
    converged: Tensor  # (R,) whether the residual is small enough
    limit: Tensor  # (R,) no finite maximum: what is reported is the limit on the way to infinity
    separated: Tensor  # (R,) of those, the rows whose likelihood tends to 1, with proof


def maximise(rows: Rows, start: Tensor) -> Optimum:
    """Find the maximum of every row, or the limit where there is none."""
    optimum = climb(rows, start, TOLERANCE)
    stuck = (~optimum.converged).nonzero().squeeze(-1)
    if len(stuck) == 0 or not rows.design.has_free_directions:
        return optimum
    followed = follow_ridges(rows.take(stuck))
    return Optimum(
        *(whole.index_copy(0, stuck, part) for whole, part in zip(optimum, followed, strict=True))
    )


def climb(rows: Rows, start: Tensor, tolerance: float) -> Optimum:
    """Take damped Newton steps until each row's last one is small, or separation is proven."""
    weights = start.clone()
    residual = weights.new_full((len(weights),), math.inf)
    separated = torch.zeros_like(residual, dtype=torch.bool)
    active = torch.arange(len(weights), device=weights.device)
    for _ in range(STEPS):
        if len(active) == 0:
            break
        part, before = rows.take(active), weights[active]
        step = part.step(before)
        weights[active] = _moved(part, before, step)
        residual[active] = step.size.nan_to_num(nan=math.inf)
        separated[active] = _proves_separation(part, weights[active])
        active = active[(step.size > tolerance) & ~separated[active]]
    residual = residual.masked_fill(separated, 0)
    return Optimum(weights, residual, residual <= tolerance, separated, separated)


def _moved(rows: Rows, weights: Tensor, step: Step) -> Tensor:
    """Take the step, as long as is safe; none where the Hessian was singular."""
    length = _length(rows, weights, step)
    moved = weights + length[:, None, None] * step.direction
    return torch.where(moved.isfinite(), moved, weights)


def _length(rows: Rows, weights: Tensor, step: Step) -> Tensor:
    """Halve the full step until it keeps its promise or is as short as the one that surely does."""
    sure = torch.where(step.size > 0, step.size.log1p() / step.size, 1.0)
    length = torch.where(step.size > NEAR, 1.0, sure)
    searching = (length > sure).nonzero().squeeze(-1)
    start = rows.take(searching).objective(weights[searching])
    while len(searching):
        part, t = rows.take(searching), length[searching]
        moved = weights[searching] + t[:, None, None] * step.direction[searching]
        keeps = part.objective(moved) >= start + SHARE * t * step.gain[searching]
        length[searching] = torch.where(keeps, t, torch.maximum(t / 2, sure[searching]))
        more = ~keeps & (length[searching] > sure[searching])
        searching, start = searching[more], start[more]
    return length


def _proves_separation(rows: Rows, weights: Tensor) -> Tensor:
    """Whether the part of the weights that costs nothing puts every point's label on top."""
    if not rows.design.has_free_directions:
        return torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
    return rows.log_lik(weights @ rows.design.free) > PROOF


def follow_ridges(rows: Rows) -> Optimum:
    """Follow the maximum as a small penalty vanishes.

    Where weights run to infinity, every hundredth of the ridge moves the logits by about log 100;
    where they do not, it hardly moves them, and the maximum is finite but hard to reach.
    """
    weights, before = rows.zero(), rows.zero()
    reached = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
    for ridge in RIDGES:
        before = weights
        weights, _, reached, _, _ = climb(rows.with_ridge(ridge), before, RIDGE_TOLERANCE)
    share = RIDGES[-1] / RIDGES[-2]
    changes = rows.log_probs(weights).exp() - rows.log_probs(before).exp()
    left = share * changes.abs().amax((-1, -2))
    limit = rows.logit_change(weights - before) > -math.log(share) / 2
    return Optimum(weights, left, reached & (left <= SETTLED), limit, torch.zeros_like(limit))
