"""Quadratic problems on the simplex, which combine the gradients of `solve/ascent.py`."""

from __future__ import annotations

import torch
from torch import Tensor

# Pairwise steps at most for every variable of a problem.
ROUNDS = 4

# Steps end when the duality gap, a bound on what is left to gain, is this share of the value.
CLOSE = 0.01

# Numbers and gradients closer than this, relative to their size, differ by rounding.
ALIKE = 1e-10


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
