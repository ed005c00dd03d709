"""The curvature of the training loss at the trained weights, apart from any prior.

`posterior(prior_precision)` makes a posterior of it, for as many prior precisions as one likes,
without seeing the data again.
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
from acnml.posteriors import Block, Diagonal, EigenBlock, Kronecker, Posterior

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
        """Return the Laplace approximation of log p(D), without its part constant in τ.

        -½ (τ‖θ̂‖² - P log τ + log |H + τI|): the larger, the better τ explains the data.
        """
        tau = checks.require_positive(prior_precision, "prior_precision")
        theta, eigenvalues = flatten(self.mean, self.mean).double(), self.eigenvalues().double()
        log_det = (eigenvalues + tau).log().sum() - len(theta) * math.log(tau)
        return -0.5 * float(tau * (theta @ theta) + log_det)


@final
@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """The diagonal of H."""

    mean: Params
    diagonal: Params

    def posterior(self, prior_precision: float) -> Diagonal:
        """Return N(θ̂, diag(1 / (h + τ)))."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        return Diagonal(self.mean, {n: 1 / (h + tau) for n, h in self.diagonal.items()})

    def eigenvalues(self) -> Tensor:
        """Return the diagonal."""
        return flatten(self.diagonal, self.mean)


class Factors(NamedTuple):
    """One layer's factors: H ≈ A ⊗ G, inputs' second moment and output gradients'."""

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
    """

    mean: Params
    factors: tuple[Factors, ...]

    def posterior(
        self, prior_precision: float, make_block: MakeBlock = EigenBlock.from_factors
    ) -> Kronecker:
        """Return N(θ̂, (H + τI)⁻¹), or with `FactorBlock.damped` the damped approximation of it."""
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
