"""The linearised problem: K-dimensional, convex, solved for all rows at once.

With logits linear in the weights, f(θ) = z₀ + J(θ - μ), the maximiser of log p_θ(y|x) + log q(θ) is
θ = μ + ΣJᵀu with u = e_y - softmax(z), z = z₀ + Κu and the kernel Κ = JΣJᵀ. Such a u maximises the
concave φ(u) = log softmax(z₀ + Κu)_y - ½ uᵀΚu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# A full Newton step is nearly always right; far from the optimum of a large kernel it is not.
HALVINGS = 40

# Changes of the objective below this many units of rounding mean nothing.
ROUNDING = 64


class LogitSolution(NamedTuple):
    """The rows of a block of inputs, solved or on the way."""

    coefficients: Tensor  # u (B, L, K)
    log_probs: Tensor  # log softmax(z) (B, L, K)
    residual: Tensor  # √(FᵀΚF) with F = e_y - softmax(z) - u (B, L)
    objective: Tensor  # φ(u) (B, L)


def solve_logits(
    logits: Tensor, kernel: Tensor, labels: Tensor, tolerance: float, steps: int
) -> LogitSolution:
    """Maximise φ by damped Newton steps, for labels (L,) of inputs with logits (B, K).

    A row stops when its residual is small enough or no step improves it any more, each for itself:
    its result does not depend on the rest of the batch.

    Args:
        logits: z₀.
        kernel: Κ (B, K, K), symmetric and positive semidefinite.
        labels: the labels y to solve for.
        tolerance: the residual to reach.
        steps: but never take more steps than this.
    """
    targets = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)  # (L, K)
    zero = torch.zeros_like(targets).expand(len(logits), -1, -1)
    state = _evaluate(zero, logits, kernel, targets)
    active = state.residual > tolerance
    for _ in range(steps):
        if not bool(active.any()):
            break
        moved = _step(state, logits, kernel, targets)
        active = active & _improved(moved, state)
        state = _choose(active, moved, state)
        active = active & (state.residual > tolerance)
    return state


def _evaluate(u: Tensor, logits: Tensor, kernel: Tensor, targets: Tensor) -> LogitSolution:
    shift = u @ kernel
    log_probs = torch.log_softmax(logits.unsqueeze(1) + shift, dim=-1)
    gap = targets - log_probs.exp() - u
    residual = ((gap @ kernel) * gap).sum(-1).clamp(min=0).sqrt()
    objective = (log_probs * targets).sum(-1) - (shift * u).sum(-1) / 2
    return LogitSolution(u, log_probs, residual, objective)


def _step(state: LogitSolution, logits: Tensor, kernel: Tensor, targets: Tensor) -> LogitSolution:
    """Take a Newton step, halved for the rows that it would not improve."""
    direction = _newton_direction(state, kernel, targets)
    size = torch.ones_like(state.objective).unsqueeze(-1)
    moved = state
    for _ in range(HALVINGS):
        moved = _evaluate(state.coefficients + size * direction, logits, kernel, targets)
        worse = ~_improved(moved, state)
        if not bool(worse.any()):
            break
        size = torch.where(worse.unsqueeze(-1), size / 2, size)
    return moved


def _improved(new: LogitSolution, old: LogitSolution) -> Tensor:
    """Whether a row's objective rose or, where rounding hides that, its residual halved."""
    rounding = ROUNDING * torch.finfo(old.objective.dtype).eps * (1 + old.objective.abs())
    not_lower = new.objective > old.objective - rounding
    return (new.objective > old.objective) | (not_lower & (new.residual < old.residual / 2))


def _newton_direction(state: LogitSolution, kernel: Tensor, targets: Tensor) -> Tensor:
    """Solve (I + HΚ)d = F, where H = diag(p) - ppᵀ is the Hessian at the logits."""
    p = state.log_probs.exp()
    gap = targets - p - state.coefficients
    mean = (p @ kernel).unsqueeze(-2)  # pᵀΚ (B, L, 1, K)
    system = p.unsqueeze(-1) * (kernel.unsqueeze(1) - mean)  # HΚ (B, L, K, K)
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.linalg.solve_ex(system, gap)[0]  # a singular system gives a step that is refused


def _choose(rows: Tensor, new: LogitSolution, old: LogitSolution) -> LogitSolution:
    """Take the chosen rows (B, L) from the new state, the others from the old."""
    chosen = (
        torch.where(rows if a.ndim == rows.ndim else rows.unsqueeze(-1), a, b)
        for a, b in zip(new, old, strict=True)
    )
    return LogitSolution(*chosen)
