"""The curvature of the training loss at the trained weights: sums over data, without a prior.

`curvature.posterior(prior_precision)` adds a Gaussian prior and returns a Laplace posterior. Many
prior precisions can be tried without another pass over the data. `acnml.save` stores a curvature.

As curvatures are sums, those of disjoint parts of the data add up: `first + second`. This is how
batches, files and processes become one fit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util import checks
from acnml._util.params import Params, flatten, zip_with
from acnml._util.torch_state import threads_for
from acnml.posteriors.base import Posterior
from acnml.posteriors.diagonal import Diagonal
from acnml.posteriors.full import Full
from acnml.posteriors.kronecker import EigenBlock, Kronecker

if TYPE_CHECKING:
    from typing_extensions import Self

# The least prior precision for a full matrix, in units of its rounding. The variances of
# differences of logits are then accurate to about a hundredth.
ROUNDING = 64


class Curvature(ABC):
    """An approximation H of -∇² log p(D|θ), summed over the data D, at the trained weights θ̂."""

    mean: Params

    @abstractmethod
    def posterior(self, prior_precision: float) -> Posterior:
        """Return the Laplace posterior N(θ̂, (H + τI)⁻¹) for the prior N(0, I/τ)."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of H, one per parameter."""

    @abstractmethod
    def with_sums(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """Apply a function to each sum over the data, of this curvature and of others."""

    @final
    def mean_eigenvalue(self) -> float:
        """Return the mean eigenvalue of H: a scale for prior precisions."""
        return float(self.eigenvalues().double().mean())

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

    def __add__(self, other: Self) -> Self:
        """Return the curvature of two disjoint parts of the data together.

        Both must be fitted with the same classifier: the same weights, which is checked, and the
        same temperature, which a curvature does not know.
        """
        if type(self) is not type(other):
            kinds = type(self).__name__, type(other).__name__
            raise TypeError(f"a {kinds[0]} and a {kinds[1]} cannot be added: use one structure")
        checks.require_same_names(other.mean, self.mean, "the second curvature", "the first")
        for name, weight in other.mean.items():
            if not torch.equal(self.mean[name].to(weight), weight):
                raise ValueError(
                    f"the second curvature was fitted at other weights, first in {name!r}: fit it "
                    "again with this network"
                )
        return self.with_sums(torch.add, other)


class Basis(NamedTuple):
    """An orthogonal basis U = U_A ⊗ U_G of a layer's parameters."""

    layer: Affine
    inputs: Tensor  # U_A ([groups,] in, in)
    outputs: Tensor  # U_G ([groups,] out, out)


@final
@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """H in a basis in which it is diagonal, or nearly so: the second moments of the gradients.

    Without `bases`, this is the diagonal of H. EK-FAC (George et al. 2018) takes for every layer
    the eigenvectors U = U_A ⊗ U_G of the factors of a `KroneckerCurvature`, and

        H ≈ U diag(s) Uᵀ,   s = diag(Uᵀ H U) = Σ_n (U_Gᵀ g_n U_A)²,

    where g_n are the matrices of gradients whose outer products sum to H. Among all matrices that
    are diagonal in this basis, this one is closest to H (in the Frobenius norm). KFAC's own
    eigenvalues, the products of those of A and G, are one of the others. So EK-FAC is never
    farther from H than KFAC, layer by layer.

    Args:
        mean: θ̂, the trained weights.
        diagonal: the diagonal of H, or s, with the same names and shapes.
        bases: none, or one for every layer.
    """

    mean: Params
    diagonal: Params
    bases: tuple[Basis, ...] = ()

    def __add__(self, other: DiagonalCurvature) -> DiagonalCurvature:
        """Return the sum, see `Curvature`. There is none if each has a basis of its own."""
        if self.bases or other.bases:
            raise ValueError(
                "curvatures of structure='ekfac' have different bases and do not add up: fit all "
                "data at once, or use structure='kron'"
            )
        return super().__add__(other)

    def with_sums(
        self, function: Callable[..., Tensor], *others: DiagonalCurvature
    ) -> DiagonalCurvature:
        """Apply a function to the diagonal, see `Curvature`."""
        parts = (other.diagonal for other in others)
        return replace(self, diagonal=zip_with(function, self.diagonal, *parts))

    def posterior(self, prior_precision: float) -> Diagonal | Kronecker:
        """Return N(θ̂, (H + τI)⁻¹)."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        var = {name: 1 / (h + tau) for name, h in self.diagonal.items()}
        if not self.bases:
            return Diagonal(self.mean, var)
        blocks = (EigenBlock(*basis, basis.layer.join(var, self.mean)) for basis in self.bases)
        return Kronecker(self.mean, tuple(blocks))

    def eigenvalues(self) -> Tensor:
        """Return the diagonal."""
        return flatten(self.diagonal, self.mean)


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

    def with_sums(self, function: Callable[..., Tensor], *others: FullCurvature) -> FullCurvature:
        """Apply a function to H, see `Curvature`."""
        parts = (other.hessian for other in others)
        return replace(self, hessian=function(self.hessian, *parts))

    def posterior(self, prior_precision: float) -> Full:
        """Return N(θ̂, (H + τI)⁻¹), or raise an error if rounding would hide the variances."""
        tau = checks.require_positive(prior_precision, "prior_precision")
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
        with threads_for(len(wide) ** 3):
            cov = torch.cholesky_inverse(torch.linalg.cholesky(wide + tau * eye))
        return Full(self.mean, ((cov + cov.T) / 2).to(dtype))

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, computed once."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> Tensor:
        return _spectrum_of(self.hessian)


class Factors(NamedTuple):
    """What a `KroneckerCurvature` has summed for a layer, over examples and positions."""

    layer: Affine
    inputs: Tensor  # Σ aaᵀ ([groups,] in, in)
    gradients: Tensor  # Σ δδᵀ ([groups,] out, out)
    counts: Tensor  # the numbers n of examples and N of inputs a, which may have several positions

    @property
    def normalised(self) -> tuple[Affine, Tensor, Tensor]:
        """The layer, A and G, in the precision of the sums."""
        data, positions = self.counts.tolist()
        A = self.inputs.double() / max(positions, 1) * math.sqrt(data)
        G = self.gradients.double() / math.sqrt(max(data, 1))
        return self.layer, A.to(self.inputs.dtype), G.to(self.gradients.dtype)


@final
@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """A Kronecker-factored block H ≈ A ⊗ G for every layer (Martens & Grosse 2015).

    Let a be a layer's inputs and δ the gradients at its outputs, for n training examples. A is √n
    times the mean of aaᵀ over examples and positions. G is √n times the mean over examples of the
    sum of δδᵀ over positions (Grosse & Martens 2016 for convolutions). A ⊗ G is therefore a sum
    over the data. Both factors contain √n, which matters if each is damped (Ritter et al. 2018).

    Args:
        mean: θ̂, the trained weights.
        factors: one `Factors` for every layer. Together they must name exactly the parameters in
            `mean`.
    """

    mean: Params
    factors: tuple[Factors, ...]

    def with_sums(
        self, function: Callable[..., Tensor], *others: KroneckerCurvature
    ) -> KroneckerCurvature:
        """Apply a function to the sums of every layer, see `Curvature`."""
        layers = zip(self.factors, *(other.factors for other in others), strict=True)
        factors = (
            Factors(own[0].layer, *map(function, *(each[1:] for each in own))) for own in layers
        )
        return replace(self, factors=tuple(factors))

    def damped(self, prior_precision: float) -> Kronecker:
        """Return a posterior with √τ added to each factor of every layer (Ritter et al. 2018)."""
        blocks = (EigenBlock.damped(*f.normalised, prior_precision) for f in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def posterior(self, prior_precision: float) -> Kronecker:
        """Return N(θ̂, (H + τI)⁻¹), block by block."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        blocks = (EigenBlock.from_factors(*f.normalised, tau) for f in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def eigenvalues(self) -> Tensor:
        """Return the products of the factors' eigenvalues, computed once."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> Tensor:
        spectra = (map(_spectrum_of, f.normalised[1:]) for f in self.factors)
        return torch.cat([(g.unsqueeze(-1) * a.unsqueeze(-2)).flatten() for a, g in spectra])


def _spectrum_of(factor: Tensor) -> Tensor:
    """Return the eigenvalues ([groups,] n) of a matrix that has none below zero."""
    with threads_for(factor.numel() * factor.shape[-1]):
        return torch.linalg.eigvalsh(factor.double()).clamp(min=0)
