"""A batch of logistic regressions that share most of their data, without singular Hessians.

The Hessian of a multinomial logistic regression can be singular for two reasons. A `Design` removes
both, once for all regressions that share the data:

- Adding the same vector to the weights of all classes does not change the probabilities. The
  weights are therefore written as θ = C V with a fixed code matrix C (K, m). For two classes,
  C = (0, 1)ᵀ and V is the only weight vector. For more classes, the columns of C are an orthonormal
  basis of the vectors that sum to zero. This loses nothing, because the penalised maximum lies in
  that subspace, and ‖θ‖ = ‖V‖.
- Without a penalty, the data may not determine the weights in some directions of feature space
  (constant or duplicate features, or more features than points). These directions are dropped, and
  the others are whitened: features become x B, where B maps (XᵀX + diag λ)/n to the identity.

The Hessian can then be nearly singular only where probabilities saturate, whatever the units of the
features.

As in every exponential family, labels enter only through a sufficient statistic. It is
T = Σ_i Cᵀe_{y_i} x_iᵀ, and the log-likelihood is ⟨V, T⟩ - Σ_i logsumexp(C V x_i).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml.exact.problem import LogisticProblem

# A query counts as outside the span of the data if its distance from it, relative to its length, is
# larger than this.
OUTSIDE = 1e-9

# The Hessian counts as singular if its mean curvature in a direction, in whitened coordinates, is
# below this. All probabilities that the direction changes are then about this close to 0 or 1.
SINGULAR = 1e-13


@final
@dataclass(frozen=True, eq=False)
class Design:
    """The data and the penalty in the coordinates of the module docstring.

    Attributes:
        features: the data in the basis, X (n, r).
        products: x_i x_iᵀ, flattened to (n, r²). Every Hessian is a weighted sum of them.
        penalty: Λ (r, r). The objective contains - tr(V Λ Vᵀ).
        free: the orthogonal projector (r, r) onto the directions without a penalty.
        codes: C (K, m), the code matrix.
        basis: B (d, r), the whitening matrix.
    """

    features: Tensor
    products: Tensor
    penalty: Tensor
    free: Tensor
    codes: Tensor
    basis: Tensor

    @staticmethod
    def of(problem: LogisticProblem) -> Design:
        """Transform a problem's features and penalty into these coordinates."""
        basis = _whitening(problem.features, problem.penalty)
        features = problem.features @ basis
        penalty = basis.mT @ (problem.penalty.unsqueeze(-1) * basis)
        codes = _class_codes(problem.classes).to(features.device)
        return Design(features, _outer(features), penalty, _null_space(penalty), codes, basis)

    @property
    def has_free_directions(self) -> bool:
        """Whether some direction has no penalty, so that a finite maximum may not exist."""
        return bool(self.free.any())

    @property
    def knows_all_directions(self) -> bool:
        """Whether the data or the penalty determine the weights in all feature directions."""
        return self.basis.shape[0] == self.basis.shape[1]

    def is_outside(self, x: Tensor) -> Tensor:
        """Return whether feature vectors (Q, d) have a component in a dropped direction."""
        rest = x - x @ self.basis @ torch.linalg.pinv(self.basis)
        return (rest.norm(dim=-1) > OUTSIDE * x.norm(dim=-1)) & (not self.knows_all_directions)

    def statistic(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return T (..., m, r) for features (n, r) and labels (..., n)."""
        return self.codes[labels].mT @ features

    def class_weights(self, weights: Tensor) -> Tensor:
        """Convert V (..., m, r) to one weight vector per class (..., K, d)."""
        return self.codes @ weights @ self.basis.mT


class Step(NamedTuple):
    """A Newton step of every row; it is NaN if the Hessian is too close to singular."""

    direction: Tensor  # (R, m, r)
    gain: Tensor  # (R,) gᵀH⁻¹g, twice the gain that the quadratic model predicts
    size: Tensor  # (R,) the largest change of a difference of two logits, over all points


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """R logistic regressions, each with the shared points and c points of its own.

    c is 1 in CNML, where it is the query, and 0 if rows differ only in their labels. Gradients and
    Hessians of all rows are matrix products with the shared features.

    Attributes:
        design: the data and the penalty that they share.
        own: the points of every row's own (R, c, r), in the design's coordinates.
        statistic: T of all points of every row (R, m, r).
    """

    design: Design
    own: Tensor
    statistic: Tensor

    @staticmethod
    def without_own(design: Design, statistic: Tensor) -> Rows:
        """Return rows that have only the shared points."""
        return Rows(design, statistic.new_empty(len(statistic), 0, statistic.shape[-1]), statistic)

    def take(self, index: Tensor) -> Rows:
        """Return some of the rows."""
        return Rows(self.design, self.own[index], self.statistic[index])

    def with_ridge(self, ridge: float) -> Rows:
        """Return the rows with an additional ridge penalty in whitened coordinates."""
        penalty = self.design.penalty
        penalty = penalty + ridge * penalty.new_ones(len(penalty)).diag()
        free = torch.zeros_like(penalty)
        return replace(self, design=replace(self.design, penalty=penalty, free=free))

    def zero(self) -> Tensor:
        """Return the weights V = 0 of every row."""
        return torch.zeros_like(self.statistic)

    def logits(self, weights: Tensor) -> Tensor:
        """Return C V x at all points (R, K, n + c), with the row's own points last."""
        parts = [weights @ features.mT for features in (self.design.features, self.own)]
        return self.design.codes @ torch.cat(parts, dim=-1)

    def log_probs(self, weights: Tensor) -> Tensor:
        """Return log p(k|x) at all points (R, n + c, K)."""
        return torch.log_softmax(self.logits(weights), dim=-2).mT

    def log_lik(self, weights: Tensor) -> Tensor:
        """Return the log-likelihood of all points of a row (R,)."""
        return (weights * self.statistic).sum((-1, -2)) - self.logits(weights).logsumexp(-2).sum(-1)

    def objective(self, weights: Tensor) -> Tensor:
        """Return the log-likelihood minus the penalty (R,)."""
        cost = ((weights @ self.design.penalty) * weights).sum((-1, -2))
        return self.log_lik(weights) - cost

    def logit_change(self, direction: Tensor) -> Tensor:
        """Return the largest change of a difference of two logits over all points (R,)."""
        changes = self.logits(direction)
        return (changes.amax(-2) - changes.amin(-2)).amax(-1)

    def step(self, weights: Tensor) -> Step:
        """Return H⁻¹g for the gradient g and the negative Hessian H of the objective."""
        gradient, hessian = self.derivatives(weights)
        factor, failed = torch.linalg.cholesky_ex(hessian)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        singular = (failed > 0) | (pivots < SINGULAR * len(self.design.features)).any(-1)
        solved = torch.cholesky_solve(gradient.flatten(-2).unsqueeze(-1), factor).squeeze(-1)
        direction = solved.masked_fill(singular.unsqueeze(-1), torch.nan).view_as(gradient)
        gain = (gradient * direction).sum((-1, -2))
        return Step(direction, gain, self.logit_change(direction))

    def derivatives(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient g (R, m, r) and the negative Hessian H (R, m·r, m·r).

        With codes C, p = softmax(C V x) and the penalty Λ,

            g = T - Σ_i Cᵀp_i x_iᵀ - 2VΛ,    H = Σ_i Cᵀ(diag p_i - p_i p_iᵀ)C ⊗ x_i x_iᵀ + 2I ⊗ Λ.
        """
        codes, n = self.design.codes, len(self.design.features)
        p = torch.softmax(self.logits(weights), dim=-2)  # (R, K, n + c)
        mean = codes.mT @ p  # (R, m, n + c)
        products = (mean.unsqueeze(-2) * mean.unsqueeze(-3)).flatten(-3, -2)
        curvature = _outer(codes).mT @ p - products  # (R, m², n + c)
        fitted = mean[..., :n] @ self.design.features + mean[..., n:] @ self.own
        hessian = curvature[..., :n] @ self.design.products + curvature[..., n:] @ _outer(self.own)
        gradient = self.statistic - fitted - 2 * weights @ self.design.penalty
        return gradient, self._square(hessian) + 2 * self._block_penalty()

    def _square(self, hessian: Tensor) -> Tensor:
        """Reshape (R, m², r²) to (R, m·r, m·r)."""
        m, r = self.statistic.shape[-2:]
        blocks = hessian.view(len(hessian), m, m, r, r)
        return blocks.transpose(-2, -3).reshape(len(hessian), m * r, m * r)

    def _block_penalty(self) -> Tensor:
        """Return I ⊗ Λ (m·r, m·r)."""
        classes, penalty = self.statistic.shape[-2], self.design.penalty
        return torch.kron(penalty.new_ones(classes).diag(), penalty)


def _class_codes(classes: int) -> Tensor:
    """Return the code matrix C (K, m), defined in the module docstring."""
    if classes == 2:
        return torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    vectors = torch.eye(classes, dtype=torch.float64)
    vectors[:, 0] = 1
    return torch.linalg.qr(vectors)[0][:, 1:]


def _whitening(features: Tensor, penalty: Tensor) -> Tensor:
    """Return B (d, r) with Bᵀ(XᵀX + diag λ)B/n = I, without directions where this is singular."""
    stacked = torch.cat([features, penalty.sqrt().diag()])
    _, sizes, directions = torch.linalg.svd(stacked, full_matrices=False)
    known = sizes > torch.finfo(features.dtype).eps * max(stacked.shape) * sizes[0]
    return directions[known].mT / sizes[known] * len(features) ** 0.5


def _null_space(penalty: Tensor) -> Tensor:
    """Return the orthogonal projector onto the null space of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(penalty)
    rounding = torch.finfo(penalty.dtype).eps * len(values)
    null = vectors * (values <= rounding * values.abs().amax()) if len(values) else vectors
    return null @ null.mT


def _outer(features: Tensor) -> Tensor:
    """Return x xᵀ of every feature vector, flattened: (..., r) to (..., r²)."""
    return (features.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)
