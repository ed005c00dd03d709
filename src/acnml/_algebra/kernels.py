"""V, the covariance of an input's K logits, in the form that its structure allows.

For a last Linear layer the logits are its outputs, and their covariance has the structure of the
posterior: it is diagonal, or diagonal in a fixed basis.
With many classes that is what makes the problem small: no K×K matrix per input need exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from typing_extensions import Self

# Up to this many classes a matrix is copied for every vector that it is multiplied with.
SMALL = 32

# Lambert's function is s (1 + a s + b s²) / (1 + c s + d s²) for s = log(1 + exp x), up to 0.54 %:
# a fit of least largest error. A step of the fourth order leaves 1e-11.
A, B, C, D = 0.53008003, 0.11048803, 0.98914547, 0.11107907
LAMBERT_STEPS = {torch.float32: 1, torch.float64: 2}

# w is negligible below this exponent, but must not be 0.
LEAST_EXPONENT = -80.0


class Kernel(ABC):
    """A symmetric, positive semidefinite K×K matrix for each of B inputs.

    One field has an entry for every input and is proportional to V. All inputs share the others.
    """

    EACH: ClassVar[str]  # the name of that field

    @abstractmethod
    def mv(self, u: Tensor) -> Tensor:
        """Return Vu for u (B, L, K)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals (B, K)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Write the matrices out: (B, K, K)."""

    def mv_rows(self, u: Tensor, inputs: Tensor) -> Tensor:
        """Return Vu for vectors u (N, K), each with the matrix of its own input (N,), sorted."""
        return self.take(inputs).mv(u.unsqueeze(1)).squeeze(1)

    def columns(self, inputs: Tensor, classes: Tensor) -> Tensor:
        """Return Ve_c for classes (N,), each with the matrix of its own input (N,): (N, K)."""
        chosen = functional.one_hot(classes, self.diagonal().shape[1]).to(self.diagonal().dtype)
        return self.mv_rows(chosen, inputs)

    @final
    def scaled(self, factor: float | Tensor) -> Self:
        """Return factor · V, for one number or one per input (B,)."""

        def times(each: Tensor) -> Tensor:
            if not isinstance(factor, Tensor):
                return each * factor
            return each * factor.reshape(-1, *[1] * (each.ndim - 1))

        return self._with_each(times)

    @final
    def take(self, rows: slice | Tensor) -> Self:
        """Return the matrices of some inputs."""
        return self._with_each(lambda each: each[rows])

    @final
    def double(self) -> Self:
        """Return it in double precision."""
        return replace(self, **{f.name: getattr(self, f.name).double() for f in fields(self)})  # type: ignore[type-var,arg-type]

    @staticmethod
    def joined(parts: Sequence[Kernel]) -> Kernel:
        """Return the kernels of several batches, which share what inputs share, as one."""
        return parts[0]._with_each(lambda _: torch.cat([getattr(k, k.EACH) for k in parts]))

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, **{self.EACH: change(getattr(self, self.EACH))})  # type: ignore[type-var]


@final
@dataclass(frozen=True, eq=False)
class DenseKernel(Kernel):
    """Matrices without structure, (B, K, K)."""

    EACH: ClassVar[str] = "matrix"

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


@final
@dataclass(frozen=True, eq=False)
class DiagonalKernel(Kernel):
    """Independent logits with variances (B, K)."""

    EACH: ClassVar[str] = "var"

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


@final
@dataclass(frozen=True, eq=False)
class SpectralKernel(Kernel):
    """U diag(s) Uᵀ with one orthogonal U (K, K) for all inputs and s (B, K)."""

    EACH: ClassVar[str] = "var"

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
    return kernel.diagonal() - 2 * moved + dot(p, moved)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of vectors (..., K), as (..., 1)."""
    return (a * b).sum(-1, keepdim=True)


def diagonal_newton(var: Tensor, p: Tensor, gap: Tensor) -> Tensor:
    """Solve (I + HD)d = gap for a diagonal D of variances, by the formula of Sherman and Morrison.

    I + HD = R⁻¹ - p(p ⊙ D)ᵀ with R = (I + diag(p ⊙ D))⁻¹. The formula's denominator is Σ_c p_c R_c,
    which loses no digits. `p` and `gap` are (..., K); `var` broadcasts against them.
    """
    weights = p * var
    ratio = (weights + 1).reciprocal_()
    column, solved = p * ratio, ratio.mul_(gap)
    factor = dot(weights, solved) / column.sum(-1, keepdim=True)
    return solved.addcmul_(factor, column)


def lambert(x: Tensor) -> Tensor:
    """Solve w + log w = x by a step of the fourth order (Fritsch, Shafer & Crowley 1973).

    In place where possible: new memory costs more than the arithmetic.
    """
    x = x.clamp(min=LEAST_EXPONENT)
    s = functional.softplus(x)
    w = (B * s).add_(A).mul_(s).add_(1).mul_(s)
    w.div_((D * s).add_(C).mul_(s).add_(1))
    for _ in range(LAMBERT_STEPS[x.dtype]):
        rest, more = (x - w).sub_(w.log()), w + 1
        q = (rest * (2 / 3)).add_(more).mul_(more)
        ratio = torch.sub(q, rest, alpha=0.5).div_(q - rest)
        w = torch.addcmul(w, w, rest.div_(more).mul_(ratio))
    return w
