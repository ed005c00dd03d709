"""A posterior over a last Linear layer: the problem is linear, and exact in logit space.

With many classes most labels cannot be made likely by any weights that the posterior allows. They
are left out of the normaliser C(x) where a bound proves that it hardly changes.

The bound. At the solution for a label y, u = e_y - p and z = z₀ + Κu. With the label m that is most
likely at the mean,

    z_y - z_m = z₀_y - z₀_m + (e_y - e_m)ᵀΚ(e_y - p)
              ≤ z₀_y - z₀_m + (Κ_yy - Κ_my)⁺ + d · max_c √Κ_cc,   d² = Κ_yy - 2Κ_my + Κ_mm,

by Cauchy and Schwarz for every class that p may favour, and p_θ̂_y(y|x) ≤ sigmoid(z_y - z_m). From
below it is bounded by the label's probability at the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acnml.kernels import Kernel
from acnml.solvers.newton import solve_logits

# Up to this many classes there is little to save, and every label is solved for.
FEW_CLASSES = 64


class Precision(NamedTuple):
    """How exactly to solve."""

    tolerance: float  # largest residual
    steps: int  # Newton steps at most
    negligible: float  # what the labels left out may add to C(x), all together


class HeadSolution(NamedTuple):
    """All labels of a block of inputs."""

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K)
    omitted: Tensor  # (B, K) what a label left out adds to C(x) at most


def solve_head(logits: Tensor, kernel: Kernel, precision: Precision, at_once: int) -> HeadSolution:
    """Solve for all labels that matter, some labels at once. Left-out ones stay at the mean."""
    if logits.shape[1] <= FEW_CLASSES:
        return _solve(logits, kernel, precision, at_once)
    # One by one: how many labels matter differs from input to input.
    each = [slice(i, i + 1) for i in range(len(logits))]
    parts = [_solve(logits[one], kernel.take(one), precision, at_once) for one in each]
    return HeadSolution(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _solve(logits: Tensor, kernel: Kernel, precision: Precision, at_once: int) -> HeadSolution:
    log_lik, residual = _at_mean(logits, kernel)
    labels, omitted = _labels_that_matter(logits, kernel, precision.negligible)
    for block in labels.split(at_once, dim=1):
        solved = solve_logits(logits, kernel, block, precision.tolerance, precision.steps)
        own = solved.log_probs.gather(-1, block.unsqueeze(-1)).squeeze(-1)
        log_lik = log_lik.scatter(1, block, own)
        residual = residual.scatter(1, block, solved.residual)
    return HeadSolution(log_lik, residual, omitted)


def _at_mean(logits: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods and residuals √(gᵀΚg) of all labels at u = 0, where g = e_y - p."""
    log_probs = torch.log_softmax(logits, dim=-1)
    p = log_probs.exp()
    moved = kernel.mv(p.unsqueeze(1)).squeeze(1)
    squared = kernel.diagonal() - 2 * moved + (p * moved).sum(-1, keepdim=True)
    return log_probs, squared.clamp(min=0).sqrt()


def _labels_that_matter(logits: Tensor, kernel: Kernel, negligible: float) -> tuple[Tensor, Tensor]:
    """Return each input's labels to solve for (B, L), and what each label adds if left out."""
    size, classes = logits.shape
    if classes <= FEW_CLASSES or negligible == 0:
        everything = torch.arange(classes, device=logits.device).expand(size, -1)
        return everything, torch.zeros_like(logits)
    added = (upper_bounds(logits, kernel) - logits.softmax(-1)).clamp(min=0)
    ascending, order = added.sort(-1)
    left_out = int((ascending.cumsum(-1) <= negligible).sum(-1).min())
    labels = order[:, left_out:]
    return labels, added.scatter(1, labels, 0.0)


def upper_bounds(logits: Tensor, kernel: Kernel) -> Tensor:
    """Bound p_θ̂_y(y|x) from above for every label, (B, K); 1 for the most likely one."""
    best = logits.argmax(-1, keepdim=True)
    column = kernel.mv(functional.one_hot(best, logits.shape[-1]).to(logits.dtype)).squeeze(1)
    own = kernel.diagonal()
    distance = (own - 2 * column + own.gather(1, best)).clamp(min=0).sqrt()
    reach = (own - column).clamp(min=0) + distance * own.amax(-1, keepdim=True).sqrt()
    bounds = torch.sigmoid(logits - logits.gather(1, best) + reach)
    return bounds.scatter(1, best, 1.0)
