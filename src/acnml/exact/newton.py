"""Damped Newton's method for a batch of logistic regressions, also without a finite maximum.

**Step sizes.** Consider a direction that changes the difference of two logits by at most R, for all
pairs of classes and all points. Along it, the third derivative of the objective is at most R times
the second, because logistic regression is generalised self-concordant (Bach 2010). A step of size
log(1 + R) / R then always improves the objective, and it tends to the full Newton step as R → 0
(Sun & Tran-Dinh 2019). Near the maximum no line search is needed, which is useful because rounding
errors would make its comparisons unreliable. Far from the maximum, a longer step is tried first. R
also serves as the stopping criterion: unlike the gradient, it does not vanish when weights diverge
to infinity.

**No finite maximum.** Without a penalty, the likelihood of separable data increases without end
along some direction. There are three cases:

- *Separation.* Along a direction without a penalty, the label of every point has the largest logit.
  The likelihood and the probability of every label tend to 1, so the limit is known exactly. This
  case is detected with certainty: if Σ_i log p(y_i|x_i) > -log 2, then every p(y_i|x_i) is above
  one half, so the current weights are such a direction.
- *Quasi-separation.* Only some points can be separated. The weights diverge, but the probabilities
  converge. Their limit equals that of the maximum with a small ridge penalty, as the ridge tends to
  0. The ridge is reduced to 1e-11. The error is proportional to the ridge, so the last change gives
  an estimate of the remaining error.
- *A query outside the span of the data*, in a direction without a penalty. `cnml` handles this.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acnml._util.torch_state import one_thread
from acnml.exact.regressions import Design, Rows, Step

TOLERANCE = 1e-8  # for the last step, in logits; the remaining error is of the order of its square
STEPS = 200  # maximum number of Newton steps
PROOF = -0.5 * math.log(2)  # a log-likelihood above -log 2 proves separation; with a safety margin

NEAR = 0.5  # steps smaller than this, in logits, are damped without a line search
SHARE = 0.1  # a longer step must achieve this fraction of the gain predicted to first order

RIDGES = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11)
RIDGE_TOLERANCE = 1e-4  # with such small ridges, diverging logits cannot be computed more exactly
SETTLED = 1e-6  # a row has converged if the estimated error of its probabilities is at most this


class Optimum(NamedTuple):
    """The result for every row, that is for every logistic regression of the batch."""

    weights: Tensor  # V (R, m, r); without a finite maximum, the last iterate
    residual: Tensor  # (R,) last Newton step in logits; with ridges, the estimated error of p
    converged: Tensor  # (R,) whether the residual is small enough
    limit: Tensor  # (R,) whether there is no finite maximum and the result is a limit
    separated: Tensor  # (R,) whether the limit is separation, where the likelihood tends to 1


def fitted(design: Design, labels: Tensor) -> tuple[Optimum, Tensor]:
    """Fit the data with each of R sequences of labels (R, n), starting at V = 0.

    Returns the optima and the log-likelihoods (R,).
    """
    rows = Rows.without_own(design, design.statistic(design.features, labels))
    optimum = maximise(rows, rows.zero())
    return optimum, rows.log_lik(optimum.weights).masked_fill(optimum.separated, 0)


@one_thread()
def maximise(rows: Rows, start: Tensor) -> Optimum:
    """Find the maximum of every row, or the limit if there is no finite maximum."""
    optimum = climb(rows, start, TOLERANCE)
    stuck = (~optimum.converged).nonzero().squeeze(-1)
    if len(stuck) == 0 or not rows.design.has_free_directions:
        return optimum
    followed = follow_ridges(rows.take(stuck))
    return Optimum(
        *(whole.index_copy(0, stuck, part) for whole, part in zip(optimum, followed, strict=True))
    )


def climb(rows: Rows, start: Tensor, tolerance: float) -> Optimum:
    """Take damped Newton steps until each row's step is small or separation is proven."""
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
    """Halve the full step until it gains enough, or is safe; singular rows do not move."""
    safe = torch.where(step.size > 0, step.size.log1p() / step.size, 1.0)
    length = torch.where(step.size > NEAR, 1.0, safe)
    start = rows.objective(weights)
    while True:
        moved = weights + length[:, None, None] * step.direction
        gains = rows.objective(moved) >= start + SHARE * length * step.gain
        short = ~gains & (length > safe)
        if not short.any():
            return torch.where(moved.isfinite(), moved, weights)
        length = torch.where(short, torch.maximum(length / 2, safe), length)


def _proves_separation(rows: Rows, weights: Tensor) -> Tensor:
    """Return whether the unpenalised part of the weights proves separation."""
    if not rows.design.has_free_directions:
        return torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
    return rows.log_lik(weights @ rows.design.free) > PROOF


def follow_ridges(rows: Rows) -> Optimum:
    """Find the limit of the maximum as a small ridge penalty tends to 0.

    If weights diverge, reducing the ridge by a factor of 100 changes the logits by about log 100.
    If they do not, it changes the logits very little, and the maximum is finite but hard to reach.
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
