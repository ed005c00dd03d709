"""Convex problems in few dimensions, solved for many rows at once.

The linearised problem: with logits linear in the weights, f(θ) = z₀ + J(θ - μ), the maximiser of
log p_θ(y|x) + log q(θ) is θ = μ + ΣJᵀu with u = e_y - softmax(z), z = z₀ + Vu and the kernel
V = JΣJᵀ. Such a u maximises the concave φ(u) = log softmax(z₀ + Vu)_y - ½ uᵀVu.

Quadratic problems on the simplex, which combine the gradients of `solvers/linearised.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acnml._algebra.kernels import Kernel

# A full Newton step is nearly always right; far from the optimum of a large kernel it is not.
HALVINGS = 40

# With a larger share of rows active, all of them take part in a step: that saves copying.
MANY = 0.5

# Scalar steps towards a good start.
TWO_CLASS_STEPS = 8

# Largest residual of a label that counts as solved, in posterior standard deviations.
UNSOLVED = 0.1

# A step must gain this share of what the slope promises: any gain at all could zigzag forever.
SHARE_OF_SLOPE = 0.1

# Changes of the objective below this many units of rounding mean nothing.
ROUNDING = 64

# Pairwise steps at most for every variable of a problem.
ROUNDS = 4

# Steps end when the duality gap, a bound on what is left to gain, is this share of the value.
CLOSE = 0.01

# Numbers and gradients closer than this, relative to their size, differ by rounding.
ALIKE = 1e-10


class LogitSolution(NamedTuple):
    """The rows of a block of inputs, solved or on the way."""

    coefficients: Tensor  # u (B, L, K)
    shift: Tensor  # Vu (B, L, K)
    log_probs: Tensor  # log softmax(z) (B, L, K)
    residual: Tensor  # √(FᵀVF) with F = e_y - softmax(z) - u (B, L)
    objective: Tensor  # φ(u) (B, L)


class _Problem(NamedTuple):
    logits: Tensor  # z₀ (B, 1, K)
    kernel: Kernel
    targets: Tensor  # e_y (B or 1, L, K)


def solve_logits(
    logits: Tensor,
    kernel: Kernel,
    labels: Tensor,
    tolerance: float,
    steps: int,
    start: Tensor | None = None,
) -> LogitSolution:
    """Maximise φ by damped Newton steps, for labels of inputs with logits (B, K).

    A row stops when its residual is small enough or no step improves it any more, each for itself:
    its result does not depend on the rest of the batch.

    Args:
        logits: z₀.
        kernel: V.
        labels: the labels y to solve for: (L,), or (B, L) for each input its own.
        tolerance: the residual to reach.
        steps: but never take more steps than this.
        start: a u (B, L, K) to begin with, if one is known.
    """
    targets = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
    problem = _Problem(logits.unsqueeze(1), kernel, targets if labels.ndim == 2 else targets[None])
    state = _start(problem) if start is None else _evaluate(problem, start, kernel.mv(start))
    active = ~(state.residual <= tolerance)  # NaN is not solved
    for _ in range(steps):
        if not bool(active.any()):
            break
        state, improved = _advance(problem, state, active)
        active = active & improved & ~(state.residual <= tolerance)
    return state


def _advance(
    problem: _Problem, state: LogitSolution, active: Tensor
) -> tuple[LogitSolution, Tensor]:
    """Take a step with the active rows (B, L); say which of them it improved."""
    if active.float().mean() > MANY:
        moved, improved = _step(problem, state)
        return _choose(active & improved, moved, state), improved
    where = active.nonzero(as_tuple=True)
    some = LogitSolution(*(tensor[where].unsqueeze(1) for tensor in state))
    moved, improved = _step(_rows(problem, *where), some)
    better = _choose(improved, moved, some)
    pairs = zip(state, better, strict=True)
    whole = (old.index_put(where, new.squeeze(1)) for old, new in pairs)
    return LogitSolution(*whole), torch.zeros_like(active).index_put(where, improved.squeeze(1))


def _rows(problem: _Problem, inputs: Tensor, labels: Tensor) -> _Problem:
    """Return rows (n,) of a problem, each as an input of its own with one label."""
    targets = problem.targets.expand(len(problem.logits), -1, -1)[inputs, labels]
    return _Problem(problem.logits[inputs], problem.kernel.take(inputs), targets.unsqueeze(1))


def _start(problem: _Problem) -> LogitSolution:
    """Begin at u = 0 or, where that is better, where the label is even with its one best rival.

    With all probability on two classes, u = t(e_y - e_m) and t = sigmoid(-(z_y - z_m)).
    """
    targets = problem.targets.expand(len(problem.logits), -1, -1)
    at_mean = _evaluate(problem, torch.zeros_like(targets), torch.zeros_like(targets))
    masked = problem.logits.masked_fill(targets > 0, -torch.inf)
    rivals = functional.one_hot(masked.argmax(-1), targets.shape[-1]).to(targets.dtype)
    direction = targets - rivals
    shift = problem.kernel.mv(direction)
    lead, spread = (problem.logits * direction).sum(-1), (shift * direction).sum(-1)
    share = two_class_share(lead, spread).unsqueeze(-1)
    even = _evaluate(problem, share * direction, share * shift)
    return _choose(even.objective > at_mean.objective, even, at_mean)


def two_class_share(lead: Tensor, spread: Tensor) -> Tensor:
    """Solve t = sigmoid(-(lead + t · spread)) roughly, by a few Newton steps.

    It is enough for starting points, and for bounds that hold for any t.
    """
    share = torch.sigmoid(-lead)
    for _ in range(TWO_CLASS_STEPS):
        s = torch.sigmoid(-(lead + share * spread))
        share = (share - (share - s) / (1 + spread * s * (1 - s))).clamp(0, 1)
    return share


def _evaluate(problem: _Problem, u: Tensor, shift: Tensor) -> LogitSolution:
    log_probs = torch.log_softmax(problem.logits + shift, dim=-1)
    gap = problem.targets - log_probs.exp() - u
    residual = (problem.kernel.mv(gap) * gap).sum(-1).clamp(min=0).sqrt()
    objective = (log_probs * problem.targets).sum(-1) - (shift * u).sum(-1) / 2
    return LogitSolution(u, shift, log_probs, residual, objective)


def _step(problem: _Problem, state: LogitSolution) -> tuple[LogitSolution, Tensor]:
    """Take a Newton step, halved for the rows that it would not improve; say which it improved."""
    p = state.log_probs.exp()
    gap = problem.targets - p - state.coefficients
    direction = problem.kernel.newton_direction(p, gap)
    shift = problem.kernel.mv(direction)
    slope = (gap * shift).sum(-1)  # of φ along the direction: ∇φ = V gap
    size = torch.ones_like(slope)
    for _ in range(HALVINGS):
        u = state.coefficients + size.unsqueeze(-1) * direction
        moved = _evaluate(problem, u, state.shift + size.unsqueeze(-1) * shift)
        improved = _improved(moved, state, SHARE_OF_SLOPE * size * slope)
        if bool(improved.all()):
            break
        size = torch.where(improved, size, size / 2)
    return moved, improved


def _improved(new: LogitSolution, old: LogitSolution, gain: Tensor) -> Tensor:
    """Whether a row's objective rose enough or, where rounding hides that, its residual halved."""
    rounding = ROUNDING * torch.finfo(old.objective.dtype).eps * (1 + old.objective.abs())
    not_lower = new.objective > old.objective - rounding
    risen = (new.objective > old.objective) & (new.objective >= old.objective + gain)
    return risen | (not_lower & (new.residual < old.residual / 2))


def _choose(rows: Tensor, new: LogitSolution, old: LogitSolution) -> LogitSolution:
    """Take the chosen rows (B, L) from the new state, the others from the old."""
    chosen = (
        torch.where(rows if a.ndim == rows.ndim else rows.unsqueeze(-1), a, b)
        for a, b in zip(new, old, strict=True)
    )
    return LogitSolution(*chosen)


# Quadratic problems on the simplex ---------------------------------------------------------------


def quadratic(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return xᵀAx, not below zero."""
    product = (matrix @ vector[..., None]).squeeze(-1)
    return (product * vector).sum(-1).clamp(min=0)


def least_on_simplex(matrix: Tensor, costs: Tensor, start: Tensor) -> Tensor:
    """Return λ with λ_i ≥ 0 and Σ_i λ_i = 1 that nearly minimises costsᵀλ + ½ λᵀAλ.

    Every step moves weight from the variable whose derivative is largest to the one with which this
    gains most, as in sequential minimal optimisation (Fan, Chen & Lin 2005). The value never rises.
    Any λ gives a direction and a valid residual; a better one makes the residual smaller.

    Args:
        matrix: A, symmetric and positive semi-definite, (..., M, M).
        costs: (..., M).
        start: feasible weights (..., M).
    """
    weights = start.clone()
    derivative = costs + (matrix @ weights[..., None]).squeeze(-1)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    for _ in range(ROUNDS * (costs.shape[-1] - 1)):
        most, high = _first_largest(torch.where(weights > ALIKE, derivative, -torch.inf))
        gaps, value = most - derivative, (weights * derivative).sum(-1, keepdim=True)
        # Every problem ends by itself, so that rows do not depend on each other.
        goes_on = value - derivative.amin(-1, keepdim=True) > CLOSE * value.abs()
        if not bool(goes_on.any()):
            break
        away = _row(matrix, high)
        both = diagonal + diagonal.gather(-1, high)
        bends = torch.maximum(both - 2 * away, ALIKE * both).clamp(min=1e-300)
        low = _first_largest((gaps.clamp(min=0) ** 2 / bends).nan_to_num(0.0))[1]
        toward = _row(matrix, low)
        step = (gaps / bends).gather(-1, low).nan_to_num(0.0).clamp(min=0)
        step = torch.where(goes_on, torch.minimum(step, weights.gather(-1, high)), 0.0)
        weights = weights.scatter_add(-1, low, step).scatter_add(-1, high, -step)
        derivative = torch.addcmul(derivative, step, toward - away)
    return weights


def _first_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value (..., 1) and the first index at which it is, up to rounding.

    Equal gradients are frequent. Rounding must not decide between them.
    """
    largest = values.amax(-1, keepdim=True)
    index = (values >= largest - ALIKE * largest.abs()).int().argmax(-1, keepdim=True)
    return largest, index


def _row(matrix: Tensor, index: Tensor) -> Tensor:
    """Return row `index` (..., 1) of every matrix."""
    return torch.take_along_dim(matrix, index[..., None], dim=-2).squeeze(-2)
