"""Diagonal: independent weights, e.g. from Bayes by Backprop, SWAG-D or diagonal Laplace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._algebra.dual import (
    Affine,
    Displacement,
    Dual,
    covariance,
    diagonal_action,
    diagonal_prefers_factors,
)
from acnml._util import checks
from acnml._util.params import Params, flatten, scale, standard_normal, subtract, zip_with
from acnml.posteriors.base import (
    Posterior,
    gaussian_log_density,
    require_density,
    require_mean,
    require_variances,
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Posterior):
    """N(μ, diag(s)) with variances s ≥ 0; a parameter with variance 0 stays fixed.

    >>> posterior = Diagonal(mean={"weight": torch.zeros(3, 4)}, var={"weight": torch.ones(3, 4)})
    >>> posterior
    Diagonal(12 parameters: weight)
    """

    mean: Params
    var: Params
    couples_layers = False

    def __post_init__(self) -> None:
        require_mean(self.mean)
        require_variances(self.var, self.mean)

    def cov_mv(self, v: Params) -> Params:
        """Return s ⊙ v."""
        return zip_with(torch.mul, v, self.var)

    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw μ + √s ⊙ ε with ε ~ N(0, I)."""
        noise = standard_normal(self.mean, n, generator)
        return zip_with(lambda mean, var, e: mean + var.sqrt() * e, self.mean, self.var, noise)

    def log_prob(self, params: Params) -> Tensor:
        """Return Σ_i log N(θ_i; μ_i, s_i)."""
        require_density(self.var)
        var = flatten(self.var, self.mean)
        offset = flatten(subtract(params, self.mean), self.mean)
        return gaussian_log_density((offset**2 / var).sum(-1), var.log().sum(), len(var))

    def scaled(self, alpha: float) -> Diagonal:
        """Return N(μ, α diag(s))."""
        checks.require_positive(alpha, "alpha")
        return Diagonal(self.mean, scale(self.var, alpha))

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Tensor:
        """Return diag(S a²): the outputs are independent."""
        return torch.diag_embed(inputs**2 @ layer.join(self.var, self.mean).T)

    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Compare the cost of the product in `displacement` with that of expanding v."""
        return diagonal_prefers_factors(terms, positions, len(self.mean[layer.weight]))

    def covariance(self, jacobian: Dual) -> Tensor:
        """Return WWᵀ with W = J ⊙ √s, where J is written out."""
        halves = [(v * self.var[n].sqrt()).flatten(2) for n, v in jacobian.dense.items()]
        parts = [half @ half.mT for half in halves]
        if jacobian.outers:
            rest = Dual({}, jacobian.outers)
            parts.append(covariance(rest, self.displacement(rest)))
        return torch.stack(parts).sum(0)

    def displacement(self, dual: Dual) -> Displacement:
        """Apply Σv to inputs a' as Σ_t δ_t ⊙ S(a_t ⊙ a'): one matrix product with S per term t."""
        return Displacement(
            {name: v * self.var[name] for name, v in dual.dense.items()},
            {layer: diagonal_action(layer, v, self.var) for layer, v in dual.outers.items()},
        )
