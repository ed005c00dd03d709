"""Κ = JΣJᵀ, the covariance of an input's K logits, in the form that its structure allows.

For a last Linear layer the logits are its outputs, and their covariance has the structure of the
posterior: it is diagonal, or a fixed matrix times a number per input, or diagonal in a fixed basis.
With many classes that is what makes the problem small: no K×K matrix per input need exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

# Up to this many classes a K×K system per row is solved directly, beyond it iteratively.
DIRECT = 64

# The iterative solution of a Newton step: how exact, and how long at most.
RELATIVE_ERROR = 1e-3
ITERATIONS = 200


class Kernel(ABC):
    """A symmetric, positive semidefinite K×K matrix for each of B inputs."""

    @abstractmethod
    def mv(self, u: Tensor) -> Tensor:
        """Return Κu for u (B, L, K)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""

    @abstractmethod
    def scaled(self, factor: float) -> Kernel:
        """Return factor · Κ."""

    @abstractmethod
    def take(self, rows: slice) -> Kernel:
        """Return the matrices of some inputs."""

    @abstractmethod
    def double(self) -> Kernel:
        """Return it in double precision."""

    def newton_direction(self, p: Tensor, gap: Tensor) -> Tensor:
        """Solve (I + HΚ)d = gap for rows (B, L, K), where H = diag(p) - ppᵀ."""
        if p.shape[-1] <= DIRECT:
            return _solved_directly(self.dense(), p, gap)
        return _solved_iteratively(self, p, gap)


@final
@dataclass(frozen=True, eq=False)
class DenseKernel(Kernel):
    """Matrices without structure, (B, K, K)."""

    matrix: Tensor

    def mv(self, u: Tensor) -> Tensor:
        """Multiply."""
        return u @ self.matrix

    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def dense(self) -> Tensor:
        """Return the matrices."""
        return self.matrix

    def scaled(self, factor: float) -> DenseKernel:
        """Return factor · Κ."""
        return DenseKernel(self.matrix * factor)

    def take(self, rows: slice) -> DenseKernel:
        """Return the matrices of some inputs."""
        return DenseKernel(self.matrix[rows])

    def double(self) -> DenseKernel:
        """Return it in double precision."""
        return DenseKernel(self.matrix.double())


@final
@dataclass(frozen=True, eq=False)
class DiagonalKernel(Kernel):
    """Independent logits with variances (B, K)."""

    var: Tensor

    def mv(self, u: Tensor) -> Tensor:
        """Multiply elementwise."""
        return u * self.var.unsqueeze(1)

    def diagonal(self) -> Tensor:
        """Return the variances."""
        return self.var

    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""
        return torch.diag_embed(self.var)

    def scaled(self, factor: float) -> DiagonalKernel:
        """Return factor · Κ."""
        return DiagonalKernel(self.var * factor)

    def take(self, rows: slice) -> DiagonalKernel:
        """Return the matrices of some inputs."""
        return DiagonalKernel(self.var[rows])

    def double(self) -> DiagonalKernel:
        """Return it in double precision."""
        return DiagonalKernel(self.var.double())

    def newton_direction(self, p: Tensor, gap: Tensor) -> Tensor:
        """Use that I + HΚ = D - p(p ⊙ s)ᵀ with D = I + diag(p ⊙ s): Sherman and Morrison's formula.

        Its denominator, 1 - (p ⊙ s)ᵀD⁻¹p, is Σ_c p_c / D_c, which loses no digits.
        """
        weights = p * self.var.unsqueeze(1)
        solved, column = gap / (1 + weights), p / (1 + weights)
        factor = (weights * solved).sum(-1, keepdim=True) / column.sum(-1, keepdim=True)
        return solved + factor * column


@final
@dataclass(frozen=True, eq=False)
class ScaledKernel(Kernel):
    """One matrix (K, K) for all inputs, times a number per input (B,)."""

    matrix: Tensor
    scale: Tensor

    def mv(self, u: Tensor) -> Tensor:
        """Multiply, all rows at once."""
        return (u @ self.matrix) * self.scale[:, None, None]

    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""
        return self.scale[:, None] * self.matrix.diagonal()

    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""
        return self.scale[:, None, None] * self.matrix

    def scaled(self, factor: float) -> ScaledKernel:
        """Return factor · Κ."""
        return ScaledKernel(self.matrix, self.scale * factor)

    def take(self, rows: slice) -> ScaledKernel:
        """Return the matrices of some inputs."""
        return ScaledKernel(self.matrix, self.scale[rows])

    def double(self) -> ScaledKernel:
        """Return it in double precision."""
        return ScaledKernel(self.matrix.double(), self.scale.double())


@final
@dataclass(frozen=True, eq=False)
class SpectralKernel(Kernel):
    """U diag(s) Uᵀ with one orthogonal U (K, K) for all inputs and s (B, K)."""

    basis: Tensor
    var: Tensor

    def mv(self, u: Tensor) -> Tensor:
        """Rotate, scale, rotate back."""
        return ((u @ self.basis) * self.var.unsqueeze(1)) @ self.basis.T

    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""
        return self.var @ (self.basis**2).T

    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""
        matrix = (self.basis * self.var.unsqueeze(1)) @ self.basis.T
        return (matrix + matrix.mT) / 2

    def scaled(self, factor: float) -> SpectralKernel:
        """Return factor · Κ."""
        return SpectralKernel(self.basis, self.var * factor)

    def take(self, rows: slice) -> SpectralKernel:
        """Return the matrices of some inputs."""
        return SpectralKernel(self.basis, self.var[rows])

    def double(self) -> SpectralKernel:
        """Return it in double precision."""
        return SpectralKernel(self.basis.double(), self.var.double())


def _solved_directly(kernel: Tensor, p: Tensor, gap: Tensor) -> Tensor:
    """Factorise the K×K system of every row."""
    mean = (p @ kernel).unsqueeze(-2)  # pᵀΚ (B, L, 1, K)
    system = p.unsqueeze(-1) * (kernel.unsqueeze(1) - mean)  # HΚ (B, L, K, K)
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.linalg.solve_ex(system, gap)[0]  # a singular system gives a step that is refused


def _solved_iteratively(kernel: Kernel, p: Tensor, gap: Tensor) -> Tensor:
    """Take conjugate gradients in the inner product xᵀΚy, in which I + HΚ is self-adjoint.

    Its eigenvalues are 1 but for as many as classes have noticeable probability: few iterations
    suffice. A row that has converged is not touched any more, whatever the others need.
    """
    d, residual = torch.zeros_like(gap), gap
    moved = kernel.mv(residual)  # Κr
    step, moved_step = residual, moved
    energy = _dot(residual, moved)
    enough = energy * RELATIVE_ERROR**2
    for _ in range(ITERATIONS):
        active = (energy > enough) & (energy > 0)
        if not bool(active.any()):
            break
        image = step + p * (moved_step - _dot(p, moved_step))  # (I + HΚ) step
        size = torch.where(active, energy / _dot(moved_step, image).clamp(min=TINY), 0.0)
        d, residual = d + size * step, residual - size * image
        moved = kernel.mv(residual)
        before, energy = energy, torch.where(active, _dot(residual, moved), energy)
        turn = torch.where(active, energy / before.clamp(min=TINY), 0.0)
        step, moved_step = residual + turn * step, moved + turn * moved_step
    return d


TINY = 1e-300


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
