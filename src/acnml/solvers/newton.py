"""The linearised problem: K-dimensional, convex, solved for all rows at once.

With logits linear in the weights, f(θ) = z₀ + J(θ - μ), the maximiser of log p_θ(y|x) + log q(θ) is
θ = μ + ΣJᵀu with u = e_y - softmax(z), z = z₀ + Κu and the kernel Κ = JΣJᵀ. Such a u maximises the
concave φ(u) = log softmax(z₀ + Κu)_y - ½ uᵀΚu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitSolution(NamedTuple):
    """The solved rows of a block of inputs."""

    coefficients: Tensor  # u (B, L, K)
    log_probs: Tensor  # log softmax(z) (B, L, K)
    residual: Tensor  # √(FᵀΚF) with F = e_y - softmax(z) - u (B, L)


def solve_logits(
    logits: Tensor, kernel: Tensor, labels: Tensor, tolerance: float, steps: int
) -> LogitSolution:
    """Maximise φ by damped Newton steps, for labels (L,) of inputs with logits (B, K).

    Args:
        logits: z₀.
        kernel: Κ (B, K, K), symmetric and positive semidefinite.
        labels: the labels y to solve for.
        tolerance: stop when no row's residual is larger.
        steps: but never take more steps than this.
    """
    targets = torch.nn.functional.one_hot(labels, logits.shape[1]).to(logits)  # (L, K)
    u = targets - logits.softmax(-1).unsqueeze(1)
    state = _evaluate(u, logits, kernel, targets)
    for _ in range(steps):
        if bool((state.residual <= tolerance).all()):
            break
        state = _step(state, logits, kernel, targets)
    return state


def _evaluate(u: Tensor, logits: Tensor, kernel: Tensor, targets: Tensor) -> LogitSolution:
    log_probs = torch.log_softmax(logits.unsqueeze(1) + u @ kernel, dim=-1)
    gap = targets - log_probs.exp() - u
    squared = ((gap @ kernel) * gap).sum(-1)
    return LogitSolution(u, log_probs, squared.clamp(min=0).sqrt())


def _objective(state: LogitSolution, kernel: Tensor, targets: Tensor) -> Tensor:
    """Return φ (B, L)."""
    fit = (state.log_probs * targets).sum(-1)
    return fit - ((state.coefficients @ kernel) * state.coefficients).sum(-1) / 2


def _step(state: LogitSolution, logits: Tensor, kernel: Tensor, targets: Tensor) -> LogitSolution:
    """Take a Newton step, halved for the rows where it would not raise the objective."""
    direction = _newton_direction(state, kernel, targets)
    before = _objective(state, kernel, targets)
    size = torch.ones_like(before)
    for _ in range(HALVINGS):
        moved = _evaluate(
            state.coefficients + size.unsqueeze(-1) * direction, logits, kernel, targets
        )
        worse = _objective(moved, kernel, targets) < before - SLACK * before.abs()
        if not bool(worse.any()):
            break
        size = torch.where(worse, size / 2, size)
    return moved


# A full Newton step is nearly always right; ten halvings reach a step of a thousandth.
HALVINGS = 10
# Rounding may lower an objective that cannot rise any more.
SLACK = 1e-6


def _newton_direction(state: LogitSolution, kernel: Tensor, targets: Tensor) -> Tensor:
    """Solve (I + HΚ)d = F, where H = diag(p) - ppᵀ is the Hessian at the logits."""
    p = state.log_probs.exp()
    gap = targets - p - state.coefficients
    scaled = p.unsqueeze(-1) * kernel.unsqueeze(1)  # diag(p) Κ, (B, L, K, K)
    hessian = scaled - p.unsqueeze(-1) * (p.unsqueeze(-2) @ kernel.unsqueeze(1))
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return torch.linalg.solve(eye + hessian, gap)
