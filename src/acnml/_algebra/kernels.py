"""V = JΣJᵀ, the covariance of an input's K logits, in the form that its structure allows.

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
from torch.nn import functional

# Up to this many classes a K×K system per row is solved directly, beyond it iteratively.
DIRECT = 64

# Up to this many classes a matrix is copied for every vector that it is multiplied with.
SMALL = 32

# The iterative solution of a Newton step: how exact, and how long at most.
RELATIVE_ERROR = 0.03
ITERATIONS = 200


class Kernel(ABC):
    """A symmetric, positive semidefinite K×K matrix for each of B inputs."""

    @abstractmethod
    def mv(self, u: Tensor) -> Tensor:
        """Return Vu for u (B, L, K)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""

    @abstractmethod
    def scaled(self, factor: float | Tensor) -> Kernel:
        """Return factor · V, for one number or one per input (B,)."""

    @abstractmethod
    def take(self, rows: slice | Tensor) -> Kernel:
        """Return the matrices of some inputs."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Kernel:
        """Return it in another precision."""

    @final
    def double(self) -> Kernel:
        """Return it in double precision."""
        return self.to(torch.float64)

    def mv_rows(self, u: Tensor, inputs: Tensor) -> Tensor:
        """Return Vu for vectors u (N, K), each with the matrix of its own input (N,), sorted."""
        return self.take(inputs).mv(u.unsqueeze(1)).squeeze(1)

    def columns(self, inputs: Tensor, classes: Tensor) -> Tensor:
        """Return Ve_c for classes (N,), each with the matrix of its own input (N,): (N, K)."""
        return self.mv_rows(one_hot(classes, self.diagonal()), inputs)

    def newton_direction(self, p: Tensor, gap: Tensor) -> Tensor:
        """Solve (I + HV)d = gap for rows (B, L, K), where H = diag(p) - ppᵀ."""
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

    def mv_rows(self, u: Tensor, inputs: Tensor) -> Tensor:
        """Copy small matrices for every vector, multiply with large ones input by input."""
        if u.shape[1] <= SMALL:
            return (u.unsqueeze(1) @ self.matrix[inputs]).squeeze(1)
        counts = torch.bincount(inputs, minlength=len(self.matrix)).tolist()
        parts = zip(u.split(counts), self.matrix, strict=True)
        return torch.cat([part @ matrix for part, matrix in parts if len(part)])

    def columns(self, inputs: Tensor, classes: Tensor) -> Tensor:
        """Look the columns up."""
        return self.matrix[inputs, classes]

    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def dense(self) -> Tensor:
        """Return the matrices."""
        return self.matrix

    def scaled(self, factor: float | Tensor) -> DenseKernel:
        """Return factor · V."""
        return DenseKernel(self.matrix * _column(_column(factor)))

    def take(self, rows: slice | Tensor) -> DenseKernel:
        """Return the matrices of some inputs."""
        return DenseKernel(self.matrix[rows])

    def to(self, dtype: torch.dtype) -> DenseKernel:
        """Return it in another precision."""
        return DenseKernel(self.matrix.to(dtype))


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

    def scaled(self, factor: float | Tensor) -> DiagonalKernel:
        """Return factor · V."""
        return DiagonalKernel(self.var * _column(factor))

    def take(self, rows: slice | Tensor) -> DiagonalKernel:
        """Return the matrices of some inputs."""
        return DiagonalKernel(self.var[rows])

    def to(self, dtype: torch.dtype) -> DiagonalKernel:
        """Return it in another precision."""
        return DiagonalKernel(self.var.to(dtype))

    def newton_direction(self, p: Tensor, gap: Tensor) -> Tensor:
        """Solve in closed form."""
        return diagonal_newton(self.var.unsqueeze(1), p, gap)


@final
@dataclass(frozen=True, eq=False)
class ScaledKernel(Kernel):
    """One matrix (K, K) for all inputs, times a number per input (B,)."""

    matrix: Tensor
    scale: Tensor

    def mv(self, u: Tensor) -> Tensor:
        """Multiply, all rows at once."""
        return (u @ self.matrix) * self.scale[:, None, None]

    def columns(self, inputs: Tensor, classes: Tensor) -> Tensor:
        """Look the columns up."""
        return self.matrix[classes] * self.scale[inputs, None]

    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""
        return self.scale[:, None] * self.matrix.diagonal()

    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""
        return self.scale[:, None, None] * self.matrix

    def scaled(self, factor: float | Tensor) -> ScaledKernel:
        """Return factor · V."""
        return ScaledKernel(self.matrix, self.scale * factor)

    def take(self, rows: slice | Tensor) -> ScaledKernel:
        """Return the matrices of some inputs."""
        return ScaledKernel(self.matrix, self.scale[rows])

    def to(self, dtype: torch.dtype) -> ScaledKernel:
        """Return it in another precision."""
        return ScaledKernel(self.matrix.to(dtype), self.scale.to(dtype))


@final
@dataclass(frozen=True, eq=False)
class SpectralKernel(Kernel):
    """U diag(s) Uᵀ with one orthogonal U (K, K) for all inputs and s (B, K)."""

    basis: Tensor
    var: Tensor

    def mv(self, u: Tensor) -> Tensor:
        """Rotate, scale, rotate back."""
        return ((u @ self.basis) * self.var.unsqueeze(1)) @ self.basis.T

    def columns(self, inputs: Tensor, classes: Tensor) -> Tensor:
        """Multiply them out."""
        return (self.basis[classes] * self.var[inputs]) @ self.basis.T

    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""
        return self.var @ (self.basis**2).T

    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""
        matrix = (self.basis * self.var.unsqueeze(1)) @ self.basis.T
        return (matrix + matrix.mT) / 2

    def scaled(self, factor: float | Tensor) -> SpectralKernel:
        """Return factor · V."""
        return SpectralKernel(self.basis, self.var * _column(factor))

    def take(self, rows: slice | Tensor) -> SpectralKernel:
        """Return the matrices of some inputs."""
        return SpectralKernel(self.basis, self.var[rows])

    def to(self, dtype: torch.dtype) -> SpectralKernel:
        """Return it in another precision."""
        return SpectralKernel(self.basis.to(dtype), self.var.to(dtype))


def centred_variances(kernel: Kernel) -> Tensor:
    """Return the diagonals (B, K) of V - a1ᵀ - 1aᵀ whose other entries sum to zero in each row.

    With R_i = Σ_j≠i V_ij these are the a with (K-2) a_i + Σ_j a_j = R_i. Negative values become 0.
    """
    var = kernel.diagonal()
    classes = var.shape[1]
    off = kernel.mv(torch.ones_like(var).unsqueeze(1)).squeeze(1) - var
    if classes == 2:
        return (var - off).clamp(min=0)
    a = (off - off.sum(-1, keepdim=True) / (2 * classes - 2)) / (classes - 2)
    return (var - 2 * a).clamp(min=0)


def gap_variances(kernel: Kernel, p: Tensor) -> Tensor:
    """Return (e_y - p)ᵀV(e_y - p) for every y (B, K), the variance of z_y - pᵀz.

    With V_yy - 2(Vp)_y + pᵀVp, no K×K matrix is needed where V has a structure.
    """
    moved = kernel.mv(p.unsqueeze(1)).squeeze(1)
    return kernel.diagonal() - 2 * moved + _dot(p, moved)


def one_hot(classes: Tensor, like: Tensor) -> Tensor:
    """Return e_c for classes (N,), with as many entries as the rows of another tensor: (N, K)."""
    return functional.one_hot(classes, like.shape[-1]).to(like.dtype)


def _column(factor: float | Tensor) -> float | Tensor:
    """Return a factor that scales the rows of a matrix: one number, or one per input (B, 1)."""
    return factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor


def diagonal_newton(var: Tensor, p: Tensor, gap: Tensor) -> Tensor:
    """Solve (I + HD)d = gap for a diagonal D of variances, by the formula of Sherman and Morrison.

    I + HD = R⁻¹ - p(p ⊙ D)ᵀ with R = (I + diag(p ⊙ D))⁻¹. The formula's denominator is Σ_c p_c R_c,
    which loses no digits. `p` and `gap` are (..., K); `var` broadcasts against them.
    """
    weights = p * var
    ratio = (weights + 1).reciprocal_()
    column, solved = p * ratio, ratio.mul_(gap)
    factor = _dot(weights, solved) / column.sum(-1, keepdim=True)
    return solved.addcmul_(factor, column)


def _solved_directly(kernel: Tensor, p: Tensor, gap: Tensor) -> Tensor:
    """Factorise the K×K system of every row."""
    mean = (p @ kernel).unsqueeze(-2)  # pᵀV (B, L, 1, K)
    system = p.unsqueeze(-1) * (kernel.unsqueeze(1) - mean)  # HV (B, L, K, K)
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.linalg.solve_ex(system, gap)[0]  # a singular system gives a step that is refused


def _solved_iteratively(kernel: Kernel, p: Tensor, gap: Tensor) -> Tensor:
    """Take conjugate gradients in the inner product xᵀVy, in which I + HV is self-adjoint.

    Its eigenvalues are 1 but for as many as classes have noticeable probability: few iterations
    suffice, and hardly any where logits of different classes are nearly independent, for which the
    start is exact. A row that has converged is not touched any more, whatever the others need.
    """
    enough = _dot(gap, kernel.mv(gap)) * RELATIVE_ERROR**2
    d = diagonal_newton(kernel.diagonal().unsqueeze(1), p, gap)
    residual = gap - _system(p, d, kernel.mv(d))
    moved = kernel.mv(residual)  # Vr
    step, moved_step = residual, moved
    energy = _dot(residual, moved)
    for _ in range(ITERATIONS):
        active = (energy > enough) & (energy > 0)
        if not bool(active.any()):
            break
        image = _system(p, step, moved_step)
        size = torch.where(active, energy / _dot(moved_step, image).clamp(min=TINY), 0.0)
        d, residual = d + size * step, residual - size * image
        moved = kernel.mv(residual)
        before, energy = energy, torch.where(active, _dot(residual, moved), energy)
        turn = torch.where(active, energy / before.clamp(min=TINY), 0.0)
        step, moved_step = residual + turn * step, moved + turn * moved_step
    return d


TINY = 1e-300


def _system(p: Tensor, d: Tensor, moved: Tensor) -> Tensor:
    """Return (I + HV)d, where `moved` is Vd."""
    return d + p * (moved - _dot(p, moved))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
