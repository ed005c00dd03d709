"""Oracles of the scalar solver, in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

from acnml.solve.isotropic import LEAST_VARIANCE, lambert, solve_isotropic
from acnml.solve.logits import solve

# Newton steps that bring answers of the curve to double precision.
POLISH = 8


def solve_diagonal(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) for V = diag(v) with v (B, K), by the solver for any V."""
    return solve(logits, torch.diag_embed(var)).log_lik


def solve_exactly(logits: Tensor, var: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return what `solve_isotropic` approximates, to 1e-9, for V = vI.

    Label y has the L at which T(L) - g_y(L) + p_y(L) = 1, see `acnml.solve.isotropic`. The left
    side is convex and falls with L.

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
        w = lambert((z + v.log()).unsqueeze(1) - L.unsqueeze(2))
        p, g = (lambert(own + v.log() + shift - L) for shift in (v, 0))
        excess = (w.sum(-1) + p - g) / v - 1
        L = L + excess * v / ((w / (1 + w)).sum(-1) + p / (1 + p) - g / (1 + g))
    return (own + v - L) - lambert(own + v.log() + v - L)
