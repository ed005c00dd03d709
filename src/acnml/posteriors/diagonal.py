"""Diagonal: independent weights, e.g. from Bayes by Backprop, SWAG-D or diagonal Laplace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._algebra.dual import (
    Action,
    Affine,
    Displacement,
    Dual,
    Outers,
    diagonal_action,
    diagonal_gram,
    gram,
    pairs_are_cheap,
)
from acnml._util import checks
from acnml._util.params import Params, flatten, scale, standard_normal, subtract, zip_with
from acnml.posteriors.base import (
    Posterior,
    gaussian_log_density,
    require_density,
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
        """Compare the products in `displacement` with expanding v."""
        return pairs_are_cheap(terms, positions)

    def covariance(self, jacobian: Dual) -> Tensor:
        """Return JΣJᵀ, summed over layers."""
        parts = [gram(v * self.var[name].sqrt()) for name, v in jacobian.dense.items()]
        for layer, outers in jacobian.outers.items():
            parts.append(diagonal_gram(outers, layer.join(self.var, self.mean)))
        return torch.stack(parts).sum(0)

    def displacement(self, dual: Dual) -> Displacement:
        """Apply Σv to inputs a' as Σ_t δ_t ⊙ S(a_t ⊙ a'): one matrix product with S per term t."""
        return Displacement(
            {name: v * self.var[name] for name, v in dual.dense.items()},
            {k: self._action(k, v) for k, v in dual.outers.items()},
        )

    def _action(self, layer: Affine, outers: Outers) -> Action:
        bias = None if layer.bias is None else self.var[layer.bias]
        return diagonal_action(outers, self.var[layer.weight].flatten(1), bias)
