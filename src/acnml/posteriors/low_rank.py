"""LowRank: a diagonal covariance plus a few directions, e.g. from SWAG."""

from __future__ import annotations

import math
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
from acnml._util.params import (
    Params,
    add,
    flatten,
    normal_like,
    scale,
    standard_normal,
    subtract,
    unflatten,
)
from acnml.posteriors.base import (
    Posterior,
    gaussian_log_density,
    require_density,
    require_like_mean,
    require_variances,
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Posterior):
    """N(μ, diag(s) + F Fᵀ): variances s ≥ 0 and r directions, the columns of F.

    Args:
        mean: μ.
        var: s, with the shapes of the mean.
        directions: F by parameter name, each of shape (r, …) with the shape of the parameter.

    >>> mean = {"weight": torch.zeros(3, 4)}
    >>> directions = {"weight": torch.randn(2, 3, 4)}
    >>> acnml.LowRank(mean, var={"weight": torch.ones(3, 4)}, directions=directions)
    LowRank(12 parameters: weight)
    """

    mean: Params
    var: Params
    directions: Params

    def __post_init__(self) -> None:
        require_variances(self.var, self.mean)
        if self.rank == 0:
            raise ValueError("there are no directions: use Diagonal")
        require_like_mean(self.directions, self.mean, "directions", self.rank)

    @property
    def rank(self) -> int:
        """The number of directions r."""
        return len(next(iter(self.directions.values())))

    def cov_mv(self, v: Params) -> Params:
        """Return s ⊙ v + F(Fᵀv)."""
        F, flat = flatten(self.directions, self.mean), flatten(v, self.mean)
        return unflatten(flat * flatten(self.var, self.mean) + (flat @ F.T) @ F, self.mean)

    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw μ + √s ⊙ ε₁ + F ε₂ with ε₁, ε₂ ~ N(0, I)."""
        noise = flatten(standard_normal(self.mean, n, generator), self.mean)
        F = flatten(self.directions, self.mean)
        offset = noise * flatten(self.var, self.mean).sqrt()
        offset = offset + normal_like(F[:, 0], n, generator) @ F
        return add(unflatten(offset, self.mean), self.mean)

    def log_prob(self, params: Params) -> Tensor:
        """Return log q(θ), using the Woodbury identity and the matrix determinant lemma.

        With D = diag(s) and C = I + Fᵀ D⁻¹ F (r×r): |Σ| = |D| |C| and
        dᵀ Σ⁻¹ d = dᵀ D⁻¹ d - (FᵀD⁻¹d)ᵀ C⁻¹ (FᵀD⁻¹d).
        """
        require_density(self.var)
        var, F = flatten(self.var, self.mean), flatten(self.directions, self.mean)
        offset = flatten(subtract(params, self.mean), self.mean)
        eye = torch.eye(self.rank, dtype=F.dtype, device=F.device)
        cholesky = torch.linalg.cholesky(eye + (F / var) @ F.T)
        projected = (offset / var) @ F.T  # (*batch, r)
        whitened = torch.linalg.solve_triangular(cholesky, projected.unsqueeze(-1), upper=False)
        distance = (offset**2 / var).sum(-1) - (whitened**2).sum((-1, -2))
        log_det = var.log().sum() + 2 * cholesky.diagonal().log().sum()
        return gaussian_log_density(distance, log_det, len(var))

    def scaled(self, alpha: float) -> LowRank:
        """Return N(μ, α(diag(s) + F Fᵀ))."""
        checks.require_positive(alpha, "alpha")
        directions = scale(self.directions, math.sqrt(alpha))
        return LowRank(self.mean, scale(self.var, alpha), directions)

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Tensor:
        """Return diag(S a²) + Σ_k (F_k a)(F_k a)ᵀ."""
        variances = inputs**2 @ layer.join(self.var, self.mean).T
        shared = torch.einsum("bi,koi->bko", inputs, layer.join(self.directions, self.mean))
        return torch.diag_embed(variances) + shared.mT @ shared

    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Decide as for the diagonal part, which dominates the cost."""
        return pairs_are_cheap(terms, positions)

    def covariance(self, jacobian: Dual) -> Tensor:
        """Return JΣJᵀ: that of the diagonal part plus (JF)(JF)ᵀ."""
        parts = [gram(v * self.var[name].sqrt()) for name, v in jacobian.dense.items()]
        for layer, outers in jacobian.outers.items():
            parts.append(diagonal_gram(outers, layer.join(self.var, self.mean)))
        return torch.stack([*parts, gram(self._projected(jacobian))]).sum(0)

    def displacement(self, dual: Dual) -> Displacement:
        """Return the product of `Diagonal.displacement` plus F c, where c = Fᵀv couples all layers.

        For a layer in factors, entry k of Fᵀ(δaᵀ) is δᵀ(F_k a), with F_k the k-th direction.
        """
        c = self._projected(dual)
        dense = {
            name: v * self.var[name] + torch.tensordot(c, self.directions[name], dims=1)
            for name, v in dual.dense.items()
        }
        return Displacement(dense, {k: self._action(k, v, c) for k, v in dual.outers.items()})

    def _projected(self, dual: Dual) -> Tensor:
        """Return Fᵀv (*batch, r)."""
        parts = [self._coefficients(name, v) for name, v in dual.dense.items()]
        parts += [self._outer_coefficients(layer, outers) for layer, outers in dual.outers.items()]
        return torch.stack(torch.broadcast_tensors(*parts)).sum(0)

    def _coefficients(self, name: str, v: Tensor) -> Tensor:
        like = {name: self.mean[name]}
        return flatten({name: v}, like) @ flatten(self.directions, like).T

    def _outer_coefficients(self, layer: Affine, outers: Outers) -> Tensor:
        F = layer.join(self.directions, self.mean)  # (r, out, in)
        if outers.inputs.shape[-2] * self.rank > F.shape[-1]:  # the matrix is smaller
            return outers.dense().flatten(-2) @ F.flatten(1).T
        moved = torch.einsum("...ti,koi->...tko", outers.inputs, F)
        return torch.einsum("...to,...tko->...k", outers.deltas, moved)

    def _action(self, layer: Affine, outers: Outers, coefficients: Tensor) -> Action:
        F = layer.join(self.directions, self.mean)
        bias = None if layer.bias is None else self.var[layer.bias]
        diagonal = diagonal_action(outers, self.var[layer.weight].flatten(1), bias)

        def act(x: Tensor) -> Tensor:
            moved = torch.einsum("...pi,koi->...pko", x, F)
            return diagonal(x) + (moved * coefficients[..., None, :, None]).sum(-2)

        return act
