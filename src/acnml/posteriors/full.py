"""Full: a dense covariance over all covered parameters, for small layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util import checks
from acnml._util.params import Params, add, count, flatten, normal_like, subtract, unflatten
from acnml.posteriors.base import Posterior, gaussian_log_density, require_mean

# Numbers in the product of inputs with Σ that are computed at once, if Σ itself is not larger.
AT_ONCE = 2**20


@final
@dataclass(frozen=True, eq=False, repr=False)
class Full(Posterior):
    """N(μ, Σ) with a dense Σ (P, P) over the P covered parameters.

    Memory and time grow with P². Use it for a last layer with at most a few thousand parameters.

    Args:
        mean: μ.
        cov: Σ, symmetric and positive semidefinite. Rows and columns follow the order of the
            parameters in `mean`, each flattened.

    >>> Full(mean={"weight": torch.zeros(3, 4)}, cov=torch.eye(12))
    Full(12 parameters: weight)
    """

    mean: Params
    cov: Tensor

    def __post_init__(self) -> None:
        require_mean(self.mean)
        size, shape = count(self.mean), tuple(self.cov.shape)
        if shape != (size, size):
            raise ValueError(f"cov has shape {shape}, but the mean has {size} entries")
        rounding = size * torch.finfo(self.cov.dtype).eps * float(self.cov.abs().max())
        if not float((self.cov - self.cov.T).abs().max()) <= rounding:  # also if it is NaN
            raise ValueError("cov must be finite and symmetric: pass (cov + cov.T) / 2")

    def cov_mv(self, v: Params) -> Params:
        """Return Σv."""
        return unflatten(flatten(v, self.mean) @ self.cov, self.mean)

    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw μ + Σ^½ ε with ε ~ N(0, I) and the symmetric square root of Σ."""
        noise = normal_like(self.cov[0], n, generator)
        return add(unflatten(noise @ self._root, self.mean), self.mean)

    def log_prob(self, params: Params) -> Tensor:
        """Return log N(θ; μ, Σ), using a Cholesky factorisation of Σ."""
        factor, failed = torch.linalg.cholesky_ex(self.cov)
        if failed:
            raise ValueError(
                "log_prob needs a positive definite cov, but this one is singular: fit it with a "
                "larger prior precision"
            )
        offset = flatten(subtract(params, self.mean), self.mean)
        white = torch.linalg.solve_triangular(factor, offset.unsqueeze(-1), upper=False)
        log_det = 2 * factor.diagonal().log().sum()
        return gaussian_log_density((white**2).sum((-1, -2)), log_det, len(factor))

    def scaled(self, alpha: float) -> Full:
        """Return N(μ, αΣ)."""
        checks.require_positive(alpha, "alpha")
        return Full(self.mean, self.cov * alpha)

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Tensor:
        """Return V_cc' = Σ_ii' a_i Cov(W_ci, W_c'i') a_i'."""
        covariances = self.by_output(layer)  # (out, in, out, in)
        out_size, in_size = covariances.shape[:2]
        parts = []
        for a in inputs.split(max(in_size, AT_ONCE // (out_size**2 * in_size))):
            half = torch.einsum("bi,cidj->bcdj", a, covariances)
            parts.append(torch.einsum("bcdj,bj->bcd", half, a))
        return torch.cat(parts)

    def by_output(self, layer: Affine) -> Tensor:
        """Return the covariances of the only layer's matrix [W b] as (out, in, out, in)."""
        columns = layer.join(unflatten(self.cov, self.mean), self.mean)  # (P, out, in)
        rows = unflatten(columns.flatten(1).T, self.mean)
        return layer.join(rows, self.mean).unflatten(0, columns.shape[1:]).permute(2, 3, 0, 1)

    @cached_property
    @torch.inference_mode(False)  # the root may be used again in another mode
    def _root(self) -> Tensor:
        """Σ^½, computed once, because many callers draw their samples one by one."""
        values, vectors = torch.linalg.eigh(self.cov.double())
        root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        return root.to(self.cov.dtype)
