"""Rows: a batch of logistic regressions that share most of their data.

Each regression is a row of the batch. It has the shared points and c additional points: one in
CNML, which is the query, and none if rows differ only in their labels. The gradients and Hessians
of all rows are matrix products with the shared features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml.exact.design import Design, outer

# The Hessian counts as singular if its mean curvature in a direction, in whitened coordinates, is
# below this. All probabilities that the direction changes are then about this close to 0 or 1.
SINGULAR = 1e-13


class Step(NamedTuple):
    """A Newton step of every row; it is NaN if the Hessian is too close to singular."""

    direction: Tensor  # (R, m, r)
    gain: Tensor  # (R,) gᵀH⁻¹g, twice the gain that the quadratic model predicts
    size: Tensor  # (R,) the largest change of a difference of two logits, over all points


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """R logistic regressions.

    Attributes:
        design: the data and the penalty that they share.
        own: the additional points of every row (R, c, r), in the design's coordinates.
        statistic: the sufficient statistic T of all points of every row (R, m, r); see `design.py`.
    """

    design: Design
    own: Tensor
    statistic: Tensor

    def take(self, index: Tensor) -> Rows:
        """Return some of the rows."""
        return Rows(self.design, self.own[index], self.statistic[index])

    def with_ridge(self, ridge: float) -> Rows:
        """Return the rows with an additional ridge penalty in whitened coordinates."""
        penalty = self.design.penalty
        penalty = penalty + ridge * torch.eye(len(penalty), dtype=penalty.dtype).to(penalty)
        free = torch.zeros_like(penalty)
        return replace(self, design=replace(self.design, penalty=penalty, free=free))

    def zero(self) -> Tensor:
        """Return the weights V = 0 of every row."""
        return torch.zeros_like(self.statistic)

    def log_probs(self, weights: Tensor) -> Tensor:
        """Return log p(k|x) at all points (R, n + c, K), with the additional points last."""
        return torch.log_softmax(self.logits(weights), dim=-2).mT

    def objective(self, weights: Tensor) -> Tensor:
        """Return the log-likelihood minus the penalty tr(V Λ Vᵀ) (R,)."""
        cost = ((weights @ self.design.penalty) * weights).sum((-1, -2))
        return self.log_lik(weights) - cost

    def log_lik(self, weights: Tensor) -> Tensor:
        """Return the log-likelihood ⟨V, T⟩ - Σ_i logsumexp(C V x_i) of all points of a row (R,)."""
        return (weights * self.statistic).sum((-1, -2)) - self.logits(weights).logsumexp(-2).sum(-1)

    def logit_change(self, direction: Tensor) -> Tensor:
        """Return the largest change of a difference of two logits over all points (R,)."""
        changes = self.logits(direction)
        return (changes.amax(-2) - changes.amin(-2)).amax(-1)

    def logits(self, weights: Tensor) -> Tensor:
        """Return C V x at all points (R, K, n + c), with the additional points last."""
        parts = [weights @ features.mT for features in (self.design.features, self.own)]
        return self.design.codes @ torch.cat(parts, dim=-1)

    def step(self, weights: Tensor) -> Step:
        """Return H⁻¹g for the gradient g and the negative Hessian H of the objective.

        With codes C, p = softmax(C V x) and the penalty Λ,

            g = T - Σ_i Cᵀp_i x_iᵀ - 2VΛ,    H = Σ_i Cᵀ(diag p_i - p_i p_iᵀ)C ⊗ x_i x_iᵀ + 2I ⊗ Λ.
        """
        gradient, hessian = self.derivatives(weights)
        factor, failed = torch.linalg.cholesky_ex(hessian)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        singular = (failed > 0) | (pivots < SINGULAR * len(self.design.features)).any(-1)
        solved = torch.cholesky_solve(gradient.flatten(-2).unsqueeze(-1), factor).squeeze(-1)
        direction = solved.masked_fill(singular.unsqueeze(-1), torch.nan).view_as(gradient)
        gain = (gradient * direction).sum((-1, -2))
        return Step(direction, gain, self.logit_change(direction))

    def derivatives(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return g (R, m, r) and H (R, m·r, m·r), defined in `step`."""
        codes, n = self.design.codes, len(self.design.features)
        p = torch.softmax(self.logits(weights), dim=-2)  # (R, K, n + c)
        mean = codes.mT @ p  # (R, m, n + c)
        products = (mean.unsqueeze(-2) * mean.unsqueeze(-3)).flatten(-3, -2)
        curvature = outer(codes).mT @ p - products  # (R, m², n + c)
        fitted = mean[..., :n] @ self.design.features + mean[..., n:] @ self.own
        hessian = curvature[..., :n] @ self.design.products + curvature[..., n:] @ outer(self.own)
        gradient = self.statistic - fitted - 2 * weights @ self.design.penalty
        return gradient, self._square(hessian) + 2 * self._block_penalty()

    def _square(self, hessian: Tensor) -> Tensor:
        """Reshape (R, m², r²) to (R, m·r, m·r)."""
        m, r = self.statistic.shape[-2:]
        blocks = hessian.view(len(hessian), m, m, r, r)
        return blocks.transpose(-2, -3).reshape(len(hessian), m * r, m * r)

    def _block_penalty(self) -> Tensor:
        """Return I ⊗ Λ (m·r, m·r)."""
        m = self.statistic.shape[-2]
        penalty = self.design.penalty
        return torch.kron(torch.eye(m, dtype=penalty.dtype, device=penalty.device), penalty)
