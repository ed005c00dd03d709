"""The curvature of the training loss at the trained weights, without a prior.

`posterior(prior_precision)` turns it into a posterior. Any number of prior precisions can be tried
without another pass over the data. `acnml.save` and `acnml.load` store a curvature.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util import checks
from acnml._util.params import Params, flatten
from acnml.posteriors import Block, Diagonal, EigenBlock, Full, Kronecker, Posterior

# Makes a block of a layer, its two factors A and G, and a prior precision.
MakeBlock: TypeAlias = Callable[[Affine, Tensor, Tensor, float], Block]


class Curvature(ABC):
    """H ≈ -∇² log p(D|θ), summed over the data, at the mean θ̂."""

    mean: Params

    @abstractmethod
    def posterior(self, prior_precision: float) -> Posterior:
        """Return the Laplace posterior N(θ̂, (H + τI)⁻¹) for the prior N(0, I/τ)."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of H, as many as there are parameters."""

    @final
    def log_evidence(self, prior_precision: float) -> float:
        """Return the Laplace approximation of log p(D), up to a constant that does not depend on τ.

        -½ (τ‖θ̂‖² - P log τ + log |H + τI|): the larger, the better τ explains the data.
        """
        tau = checks.require_positive(prior_precision, "prior_precision")
        theta, eigenvalues = flatten(self.mean, self.mean).double(), self.eigenvalues().double()
        log_det = (eigenvalues + tau).log().sum() - len(theta) * math.log(tau)
        return -0.5 * float(tau * (theta @ theta) + log_det)


@final
@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """The diagonal of H.

    Args:
        mean: θ̂, the trained weights.
        diagonal: the diagonal of H, of the same names and shapes.
    """

    mean: Params
    diagonal: Params

    def __post_init__(self) -> None:
        checks.require_mean(self.mean)
        checks.require_same_names(self.diagonal, self.mean, "diagonal", "mean")
        for name, tensor in self.diagonal.items():
            if tensor.shape != self.mean[name].shape:
                raise ValueError(
                    f"diagonal of {name!r} has shape {tuple(tensor.shape)}, "
                    f"its mean {tuple(self.mean[name].shape)}"
                )

    def posterior(self, prior_precision: float) -> Diagonal:
        """Return N(θ̂, diag(1 / (h + τ)))."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        return Diagonal(self.mean, {n: 1 / (h + tau) for n, h in self.diagonal.items()})

    def eigenvalues(self) -> Tensor:
        """Return the diagonal."""
        return flatten(self.diagonal, self.mean)


@final
@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """All of H, for small layers.

    Args:
        mean: θ̂, the trained weights.
        hessian: H (P, P), in the order of the parameters in `mean`, each flattened.
    """

    mean: Params
    hessian: Tensor

    def posterior(self, prior_precision: float) -> Full:
        """Return N(θ̂, (H + τI)⁻¹)."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        eye = torch.eye(len(self.hessian), dtype=torch.float64, device=self.hessian.device)
        cov = torch.cholesky_inverse(torch.linalg.cholesky(self.hessian.double() + tau * eye))
        return Full(self.mean, ((cov + cov.T) / 2).to(self.hessian.dtype))

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of H."""
        return torch.linalg.eigvalsh(self.hessian.double()).clamp(min=0)


class Factors(NamedTuple):
    """One layer's factors, H ≈ A ⊗ G: second moments of its inputs and of its output gradients."""

    layer: Affine
    inputs: Tensor  # A ([groups,] in, in)
    gradients: Tensor  # G ([groups,] out, out)


@final
@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """A Kronecker-factored block of H for every layer (Martens & Grosse 2015).

    With n data, A is √n times the mean of aaᵀ over data and positions, G is √n times the mean over
    data of Σ δδᵀ over positions (Grosse & Martens 2016 for convolutions), so that A ⊗ G sums over
    the data, and both factors carry the same share of n when each is damped (Ritter et al. 2018).

    Args:
        mean: θ̂, the trained weights.
        factors: one `Factors` for every layer; their parameters are the mean's.
    """

    mean: Params
    factors: tuple[Factors, ...]

    def __post_init__(self) -> None:
        checks.require_mean(self.mean)
        names = [name for factors in self.factors for name in factors.layer.names]
        checks.require_same_names(names, self.mean, "the factors", "mean")
        for layer, inputs, gradients in self.factors:
            *groups, out_size, in_size = layer.join(self.mean, self.mean).shape
            expected = (*groups, in_size, in_size), (*groups, out_size, out_size)
            if (inputs.shape, gradients.shape) != expected:
                raise ValueError(
                    f"the factors of {layer.weight!r} have shapes {tuple(inputs.shape)} and "
                    f"{tuple(gradients.shape)}, its parameters need {expected[0]} and {expected[1]}"
                )

    def posterior(
        self, prior_precision: float, make_block: MakeBlock = EigenBlock.from_factors
    ) -> Kronecker:
        """Return N(θ̂, (H + τI)⁻¹); `FactorBlock.damped` gives the factor-damped approximation."""
        blocks = (make_block(*factors, prior_precision) for factors in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def eigenvalues(self) -> Tensor:
        """Return all products of the factors' eigenvalues."""
        return torch.cat([_products(factors) for factors in self.factors])


def _products(factors: Factors) -> Tensor:
    """Return the eigenvalues of A ⊗ G, flat."""
    a, g = (
        torch.linalg.eigvalsh(f.double()).clamp(min=0) for f in (factors.inputs, factors.gradients)
    )
    return (g.unsqueeze(-1) * a.unsqueeze(-2)).flatten()
