"""The curvature of the training loss at the trained weights, without a prior.

`curvature.posterior(prior_precision)` adds a Gaussian prior and returns a Laplace posterior. Many
prior precisions can be tried without another pass over the data. `acnml.save` stores a curvature.

Curvatures are sums over data, so those of disjoint parts of the data add up: `first + second` is
the curvature of both parts together. This is how fits in several processes become one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util import checks
from acnml._util.params import Params, add, count, flatten
from acnml._util.torch_state import threads_for
from acnml.posteriors.base import Posterior
from acnml.posteriors.diagonal import Diagonal
from acnml.posteriors.full import Full
from acnml.posteriors.kronecker import EigenBlock, Kronecker

if TYPE_CHECKING:
    from typing_extensions import Self

# Products per weight that a curvature may take: those of the eigenvectors of a layer this wide.
WIDTH = 1024

# The least prior precision for a full matrix, in units of its rounding. The variances of
# differences of logits are then accurate to about a hundredth.
ROUNDING = 64


class Curvature(ABC):
    """An approximation H of -∇² log p(D|θ), summed over the data D, at the trained weights θ̂."""

    mean: Params

    @final
    def posterior(self, prior_precision: float) -> Posterior:
        """Return the Laplace posterior N(θ̂, (H + τI)⁻¹) for the prior N(0, I/τ)."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        with threads_for_algebra(self.mean):
            return self._posterior(tau)

    @final
    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of H, one per parameter."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> Tensor:
        """The eigenvalues, computed once for any number of priors."""
        with threads_for_algebra(self.mean):
            return self._eigenvalues()

    @abstractmethod
    def _posterior(self, tau: float) -> Posterior: ...

    @abstractmethod
    def _eigenvalues(self) -> Tensor: ...

    def trace(self) -> float:
        """Return the trace of H, the sum of its eigenvalues."""
        return float(self.eigenvalues().double().sum())

    @final
    def mean_eigenvalue(self) -> float:
        """Return the mean eigenvalue of H: a scale for prior precisions."""
        return self.trace() / count(self.mean)

    @final
    def log_evidence(self, prior_precision: float) -> float:
        """Return the Laplace approximation of log p(D), up to a constant that is independent of τ.

        It is -½ (τ‖θ̂‖² - P log τ + log |H + τI|) for P parameters and the prior precision τ. Larger
        values mean that the prior fits better.
        """
        tau = checks.require_positive(prior_precision, "prior_precision")
        theta, eigenvalues = flatten(self.mean, self.mean).double(), self.eigenvalues().double()
        log_det = (eigenvalues + tau).log().sum() - len(theta) * math.log(tau)
        return -0.5 * float(tau * (theta @ theta) + log_det)

    @final
    def __add__(self, other: Self) -> Self:
        """Return the curvature of two disjoint parts of the data together.

        Both must be fitted with the same classifier: the same weights, which is checked, and the
        same temperature, which a curvature does not know.
        """
        if type(self) is not type(other):
            kinds = type(self).__name__, type(other).__name__
            raise TypeError(f"a {kinds[0]} and a {kinds[1]} cannot be added: use one structure")
        checks.require_same_names(other.mean, self.mean, "the second curvature", "the first")
        require_same_weights(other.mean, self.mean, "the second curvature")
        return self._plus(other)

    @abstractmethod
    def _plus(self, other: Self) -> Self: ...


def threads_for_algebra(mean: Params) -> AbstractContextManager[None]:
    """Use one thread for the algebra of a small curvature, or as many as before."""
    return threads_for(WIDTH * count(mean))


def require_same_weights(given: Params, own: Params, what: str) -> None:
    """Raise an error if a curvature was fitted at other weights; their types may differ."""
    for name, tensor in given.items():
        if not torch.equal(own[name].to(tensor), tensor):
            raise ValueError(
                f"{what} was fitted at other weights, first in {name!r}: fit it again with this "
                "network"
            )


@final
@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """The diagonal of H.

    Args:
        mean: θ̂, the trained weights.
        diagonal: the diagonal of H, with the same names and shapes.
    """

    mean: Params
    diagonal: Params

    def _posterior(self, tau: float) -> Diagonal:
        return Diagonal(self.mean, {n: 1 / (h + tau) for n, h in self.diagonal.items()})

    def _eigenvalues(self) -> Tensor:
        return flatten(self.diagonal, self.mean)

    def _plus(self, other: DiagonalCurvature) -> DiagonalCurvature:
        return DiagonalCurvature(self.mean, add(self.diagonal, other.diagonal))


@final
@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """The full matrix H, for small layers.

    Args:
        mean: θ̂, the trained weights.
        hessian: H (P, P). Rows and columns follow the order of the parameters in `mean`, each
            flattened.
    """

    mean: Params
    hessian: Tensor

    def _posterior(self, tau: float) -> Full:
        dtype, wide = self.hessian.dtype, self.hessian.double()
        # The data say nothing about a change that moves all logits of an input alike, so that its
        # variance is 1/τ. It cancels in the differences of logits, with variances down to 1/λ_max:
        # rounding must leave digits of both.
        least = ROUNDING * torch.finfo(dtype).eps * float(torch.linalg.matrix_norm(wide))
        if tau < least:
            raise ValueError(
                f"a prior precision of {tau:.2g} is too small for {dtype}: the variances that "
                f"matter would be lost in rounding. Raise prior_precision above {least:.2g}, or "
                "convert the model to double precision by model.double()"
            )
        eye = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
        cov = torch.cholesky_inverse(torch.linalg.cholesky(wide + tau * eye))
        return Full(self.mean, ((cov + cov.T) / 2).to(dtype))

    def _eigenvalues(self) -> Tensor:
        return _spectrum_of(self.hessian)

    def _plus(self, other: FullCurvature) -> FullCurvature:
        return FullCurvature(self.mean, self.hessian + other.hessian)


class Factors(NamedTuple):
    """The factors of a layer's H ≈ A ⊗ G: second moments of its inputs and output gradients."""

    layer: Affine
    inputs: Tensor  # A ([groups,] in, in)
    gradients: Tensor  # G ([groups,] out, out)


@final
@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """A Kronecker-factored block of H for every layer (Martens & Grosse 2015).

    Let a be a layer's inputs and δ the gradients at its outputs, for n training examples. A is √n
    times the mean of aaᵀ over examples and positions. G is √n times the mean over examples of the
    sum of δδᵀ over positions (Grosse & Martens 2016 for convolutions). A ⊗ G is therefore a sum
    over the data. Both factors contain √n, which matters if each is damped (Ritter et al. 2018).

    Args:
        mean: θ̂, the trained weights.
        factors: one `Factors` for every layer. Together they must name exactly the parameters in
            `mean`.
        data: the number n of training examples.
        positions: the number of input vectors a of every layer, n times the positions of an
            example.
    """

    mean: Params
    factors: tuple[Factors, ...]
    data: int
    positions: tuple[int, ...]

    def _posterior(self, tau: float) -> Kronecker:
        blocks = (EigenBlock.from_factors(*factors, tau) for factors in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def damped(self, prior_precision: float) -> Kronecker:
        """Return a posterior with √τ added to each factor of every layer (Ritter et al. 2018)."""
        blocks = (EigenBlock.damped(*factors, prior_precision) for factors in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def _eigenvalues(self) -> Tensor:
        spectra = ((_spectrum_of(f.gradients), _spectrum_of(f.inputs)) for f in self.factors)
        return torch.cat([(g.unsqueeze(-1) * a.unsqueeze(-2)).flatten() for g, a in spectra])

    def trace(self) -> float:
        """Return the sum over layers and groups of tr(A) tr(G)."""
        return sum(float((_trace(f.inputs) * _trace(f.gradients)).sum()) for f in self.factors)

    def _plus(self, other: KroneckerCurvature) -> KroneckerCurvature:
        """Return what a fit on all data would have returned, which is not A₁ ⊗ G₁ + A₂ ⊗ G₂.

        The sums behind the factors add up: Σ aaᵀ = A N/√n over N positions, and Σ δδᵀ = √n G. So

            A = √n/N (A₁ N₁/√n₁ + A₂ N₂/√n₂)  and  G = (√n₁ G₁ + √n₂ G₂)/√n

        with n = n₁ + n₂ and N = N₁ + N₂.
        """
        data = self.data + other.data
        root, own_root, other_root = (math.sqrt(n) for n in (data, self.data, other.data))
        positions = tuple(a + b for a, b in zip(self.positions, other.positions, strict=True))
        factors = []
        for index, (layer, A, G) in enumerate(self.factors):
            _, other_A, other_G = other.factors[index]
            own_share = self.positions[index] / own_root
            other_share = other.positions[index] / other_root
            inputs = A.double() * own_share + other_A.double() * other_share
            inputs = inputs * (root / max(positions[index], 1))
            gradients = (G.double() * own_root + other_G.double() * other_root) / root
            factors.append(Factors(layer, inputs.to(A.dtype), gradients.to(G.dtype)))
        return KroneckerCurvature(self.mean, tuple(factors), data, positions)


class EigenFactors(NamedTuple):
    """A layer's H ≈ U diag(s) Uᵀ with U = U_A ⊗ U_G."""

    layer: Affine
    input_basis: Tensor  # U_A ([groups,] in, in), orthogonal
    output_basis: Tensor  # U_G ([groups,] out, out), orthogonal
    values: Tensor  # s ([groups,] out, in), the eigenvalues


@final
@dataclass(frozen=True, eq=False)
class EkfacCurvature(Curvature):
    """A block U diag(s) Uᵀ of H for every layer, in the eigenbasis of KFAC (George et al. 2018).

    U = U_A ⊗ U_G has the eigenvectors of the factors A ⊗ G of a `KroneckerCurvature`. The
    eigenvalues are the second moments of the gradients in this basis, summed over the data:

        s = diag(Uᵀ H U) = Σ_n (U_Gᵀ g_n U_A)²,

    where g_n are the matrices of gradients whose outer products sum to H. Among all matrices that
    are diagonal in this basis, this one is closest to H (in the Frobenius norm). KFAC's own
    eigenvalues, the products of those of A and G, are one of the others. So EK-FAC is never
    farther from H than KFAC, layer by layer.

    Args:
        mean: θ̂, the trained weights.
        factors: one `EigenFactors` for every layer. Together they must name exactly the parameters
            in `mean`.
    """

    mean: Params
    factors: tuple[EigenFactors, ...]

    def _posterior(self, tau: float) -> Kronecker:
        blocks = (EigenBlock(*f[:3], 1 / (f.values + tau)) for f in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def _eigenvalues(self) -> Tensor:
        return torch.cat([factors.values.flatten() for factors in self.factors])

    def _plus(self, other: EkfacCurvature) -> EkfacCurvature:
        factors = []
        for own, its in zip(self.factors, other.factors, strict=True):
            bases = (own.input_basis, its.input_basis), (own.output_basis, its.output_basis)
            if not all(torch.equal(*pair) for pair in bases):
                raise ValueError(
                    f"the curvatures have different bases, first for {own.layer.weight!r}: fit the "
                    "parts with the same `basis`, the curvature of all data with structure='kron'"
                )
            factors.append(own._replace(values=own.values + its.values))
        return EkfacCurvature(self.mean, tuple(factors))


def _spectrum_of(factor: Tensor) -> Tensor:
    """Return the eigenvalues ([groups,] n) of a matrix that has none below zero."""
    return torch.linalg.eigvalsh(factor.double()).clamp(min=0)


def _trace(matrices: Tensor) -> Tensor:
    """Return the traces of matrices ([groups,] n, n)."""
    return matrices.double().diagonal(dim1=-2, dim2=-1).sum(-1)
