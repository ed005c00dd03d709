"""Oracles of the scalar solver, in double precision: Newton steps for every label, K² operations.

With the names of `acnml.solve.isotropic`: label y has the L at which T(L) - g_y(L) + p_y(L) = 1.
The left side is convex and falls with L.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acnml.solve.isotropic import LEAST_VARIANCE, lambert, solve_isotropic

# Newton steps of `solve_diagonal` at most; they approach the solution from one side.
MOST_STEPS = 100

# Newton steps that bring answers of the curve to double precision.
POLISH = 8


def solve_exactly(logits: Tensor, var: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return what `solve_isotropic` approximates, to 1e-9, for V = vI.

    Args:
        logits: z (B, K), in double precision.
        var: v (B,).
        labels: indices (n,) of the labels to solve for; by default all, as (B, K).
    """
    start = solve_isotropic(logits, var)
    z = logits - logits.amax(-1, keepdim=True)
    v = var.unsqueeze(-1).clamp(min=LEAST_VARIANCE)
    chosen = torch.arange(z.shape[1]) if labels is None else labels
    own, found = z[:, chosen], start[:, chosen]
    L = own + v * (1 - found.exp()) - found
    for _ in range(POLISH):
        L = L + _step(z, v, own, v, L)
    return (own + v - L) - lambert(own + v.log() + v - L)


def solve_diagonal(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) for V = diag(v) with v (B, K), to 1e-9 or all digits.

    Newton's steps from any point lead to the left side of the solution and stay there.
    """
    z = logits - logits.amax(-1, keepdim=True)
    v = var.clamp(min=LEAST_VARIANCE)
    L = (z.logsumexp(-1, keepdim=True) - v.amax(-1, keepdim=True)).expand_as(z)
    for _ in range(MOST_STEPS):
        step = _step(z, v, z, v, L)
        L = L + step
        if bool((step.abs() <= 4 * torch.finfo(z.dtype).eps * (1 + L.abs())).all()):
            break
    return (z + v - L) - lambert(z + v.log() + v - L)


def _step(z: Tensor, v: Tensor, own_z: Tensor, own_v: Tensor, L: Tensor) -> Tensor:
    """Return Newton's step (B, n) of labels with logits (B, n), each with an L of its own."""
    w = lambert((z + v.log()).unsqueeze(1) - L.unsqueeze(2))
    mass, decline = (w / v.unsqueeze(1)).sum(-1), (w / (1 + w) / v.unsqueeze(1)).sum(-1)
    own, other = (lambert(own_z + own_v.log() + shift - L) for shift in (own_v, 0))
    excess = mass + (own - other) / own_v - 1
    return excess / (decline + (own / (1 + own) - other / (1 + other)) / own_v)
