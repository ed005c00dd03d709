"""Newton's method for a batch of logistic regressions that share most of their data.

**Coordinates.** The Hessian of a multinomial logistic regression can be singular for two reasons.
Both are removed, once for all regressions that share the data:

- Adding the same vector to the weights of all classes does not change the probabilities. The
  weights are therefore written as θ = C V with a fixed code matrix C (K, m). For two classes,
  C = (0, 1)ᵀ and V is the only weight vector. For more classes, the columns of C are an orthonormal
  basis of the vectors that sum to zero. This loses nothing, because the penalised maximum lies in
  that subspace, and ‖θ‖ = ‖V‖.
- Without a penalty, the data may not determine the weights in some directions of feature space
  (constant or duplicate features, or more features than points). These directions are dropped, and
  the others are whitened: features become x B, where B maps (XᵀX + diag λ)/n to the identity.

As in every exponential family, labels enter only through a sufficient statistic. It is
T = Σ_i Cᵀe_{y_i} x_iᵀ, and the log-likelihood is ⟨V, T⟩ - Σ_i logsumexp(C V x_i).

**Steps.** Consider a direction that changes the difference of two logits by at most R, for all
pairs of classes and all points. Along it, the third derivative of the objective is at most R times
the second, because logistic regression is generalised self-concordant (Bach 2010). A step of size
log(1 + R) / R then always improves the objective, and it tends to the full Newton step as R → 0
(Sun & Tran-Dinh 2019). A line search tries longer steps first, because the maximum of data that are
nearly separable is far away. R also serves as the stopping criterion.

**No finite maximum.** Without a penalty, the likelihood of separable data increases without end
along some direction. There are two cases:

- *Separation.* The label of every point has the largest logit, and all its probabilities tend to 1.
  If Σ_i log p(y_i|x_i) > -log 2, then every p(y_i|x_i) is above one half, so the current weights
  are such a direction. The result is a point far along it.
- *Quasi-separation.* Only some points can be separated. The weights diverge, but the probabilities
  converge: their limit is that of the maximum with a small ridge penalty, as the ridge tends to 0.
  It is taken with ridges of 1e-9 and of 1e-11, in whitened coordinates. The error is proportional
  to the ridge, so their difference gives an estimate of what remains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._util.torch_state import one_thread
from acnml.exact.problem import LogisticProblem

TOLERANCE = 1e-8  # for the last step, in logits; the remaining error is of the order of its square
STEPS = 200  # maximum number of Newton steps

PROOF = -0.5 * math.log(2)  # a log-likelihood above -log 2 proves separation; with a safety margin
FAR = 100  # times weights with this proof, every label has the probability 1 up to e^-80

# The Hessian counts as singular if its mean curvature in a direction, in whitened coordinates, is
# below this. All probabilities that the direction changes are then about this close to 0 or 1.
SINGULAR = 1e-13

RIDGE, SHARE = 1e-11, 0.01  # the last ridge, and what share it is of the one before
RIDGE_TOLERANCE = 1e-4  # with such small ridges, diverging logits cannot be computed more exactly
SETTLED = 1e-6  # a limit has converged if the estimated error of its probabilities is at most this


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """R logistic regressions, each with n shared points and c points of its own.

    c is 1 in CNML, where it is the query, and 0 if rows differ only in their labels. Gradients and
    Hessians of all rows are matrix products with the shared features. All points and weights are in
    the coordinates of the module docstring.

    Attributes:
        features: the shared points, X (n, r).
        products: x_i x_iᵀ, flattened to (n, r²). Every Hessian is a weighted sum of them.
        penalty: Λ (r, r). The objective contains - tr(V Λ Vᵀ).
        codes: C (K, m), the code matrix.
        basis: B (d, r), the whitening matrix.
        own: the points of every row's own (R, c, r).
        statistic: T of all points of every row (R, m, r).
    """

    features: Tensor
    products: Tensor
    penalty: Tensor
    codes: Tensor
    basis: Tensor
    own: Tensor
    statistic: Tensor

    @staticmethod
    def of(problem: LogisticProblem, labels: Tensor) -> Rows:
        """Return a regression on the problem's points for each of R sequences of labels (R, n)."""
        basis = _whitening(problem.features, problem.penalty)
        features = problem.features @ basis
        penalty = basis.mT @ (problem.penalty.unsqueeze(-1) * basis)
        codes = _class_codes(problem.classes).to(features.device)
        own = features.new_empty(len(labels), 0, features.shape[1])
        statistic = codes[labels].mT @ features
        return Rows(features, _outer(features), penalty, codes, basis, own, statistic)

    def with_queries(self, queries: Tensor) -> Rows:
        """Return Q·K rows: the only row with each query x (Q, d) added, in every class."""
        points = (queries @ self.basis).repeat_interleave(len(self.codes), dim=0).unsqueeze(1)
        codes = self.codes.repeat(len(queries), 1).unsqueeze(-1)
        return replace(self, own=points, statistic=self.statistic + codes @ points)

    def take(self, index: Tensor) -> Rows:
        """Return some of the rows."""
        return replace(self, own=self.own[index], statistic=self.statistic[index])

    def with_ridge(self, ridge: float) -> Rows:
        """Return the rows with an additional ridge penalty."""
        return replace(self, penalty=self.penalty + torch.full_like(self.penalty[0], ridge).diag())

    def class_weights(self, weights: Tensor) -> Tensor:
        """Convert V (..., m, r) to one weight vector per class (..., K, d)."""
        return self.codes @ weights @ self.basis.mT

    def logits(self, weights: Tensor) -> Tensor:
        """Return C V x at all points (R, K, n + c), with the row's own points last."""
        parts = [weights @ features.mT for features in (self.features, self.own)]
        return self.codes @ torch.cat(parts, dim=-1)

    def log_probs(self, weights: Tensor) -> Tensor:
        """Return log p(k|x) at all points (R, n + c, K)."""
        return torch.log_softmax(self.logits(weights), dim=-2).mT

    def log_lik(self, weights: Tensor) -> Tensor:
        """Return the log-likelihood of all points of a row (R,)."""
        return (weights * self.statistic).sum((-1, -2)) - self.logits(weights).logsumexp(-2).sum(-1)

    def objective(self, weights: Tensor) -> Tensor:
        """Return the log-likelihood minus the penalty (R,)."""
        return self.log_lik(weights) - ((weights @ self.penalty) * weights).sum((-1, -2))

    def logit_change(self, direction: Tensor) -> Tensor:
        """Return the largest change R of a difference of two logits over all points (R,)."""
        changes = self.logits(direction)
        return (changes.amax(-2) - changes.amin(-2)).amax(-1)

    def newton_step(self, weights: Tensor) -> Tensor:
        """Return H⁻¹g (R, m, r); it is NaN if the Hessian is too close to singular."""
        gradient, hessian = self.derivatives(weights)
        factor, failed = torch.linalg.cholesky_ex(hessian)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        singular = (failed > 0) | (pivots < SINGULAR * len(self.features)).any(-1)
        solved = torch.cholesky_solve(gradient.flatten(-2).unsqueeze(-1), factor)
        return solved.masked_fill(singular[:, None, None], torch.nan).view_as(gradient)

    def derivatives(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient g (R, m, r) and the negative Hessian H (R, m·r, m·r).

        With codes C, p = softmax(C V x) and the penalty Λ,

            g = T - Σ_i Cᵀp_i x_iᵀ - 2VΛ,    H = Σ_i Cᵀ(diag p_i - p_i p_iᵀ)C ⊗ x_i x_iᵀ + 2I ⊗ Λ.
        """
        (m, r), n = self.statistic.shape[-2:], len(self.features)
        p = torch.softmax(self.logits(weights), dim=-2)  # (R, K, n + c)
        mean = self.codes.mT @ p  # (R, m, n + c)
        products = (mean.unsqueeze(-2) * mean.unsqueeze(-3)).flatten(-3, -2)
        curvature = _outer(self.codes).mT @ p - products  # (R, m², n + c)
        fitted = mean[..., :n] @ self.features + mean[..., n:] @ self.own
        summed = curvature[..., :n] @ self.products + curvature[..., n:] @ _outer(self.own)
        hessian = summed.view(-1, m, m, r, r).transpose(-2, -3).reshape(-1, m * r, m * r)
        ridge = torch.kron(self.penalty.new_ones(m).diag(), self.penalty)
        return self.statistic - fitted - 2 * weights @ self.penalty, hessian + 2 * ridge


class Optimum(NamedTuple):
    """The result for every row, that is for every logistic regression of the batch."""

    weights: Tensor  # V (R, m, r); if there is no finite maximum, far along the way to the limit
    residual: Tensor  # (R,) last Newton step in logits; for limits, the estimated error of p
    converged: Tensor  # (R,) whether the residual is small enough
    limit: Tensor  # (R,) whether there is no finite maximum and the result is a limit


@one_thread()
def maximise(rows: Rows) -> Optimum:
    """Find the maximum of every row, or the limit if there is no finite maximum."""
    optimum = _climb(rows, torch.zeros_like(rows.statistic), TOLERANCE)
    stuck = (~optimum.converged).nonzero().squeeze(-1)
    if len(stuck) == 0:
        return optimum
    limits = _follow_ridges(rows.take(stuck))
    return Optimum(*(t.index_copy(0, stuck, own) for t, own in zip(optimum, limits, strict=True)))


def _climb(rows: Rows, start: Tensor, tolerance: float) -> Optimum:
    """Take damped Newton steps until each row's step is small or separation is proven."""
    weights = start.clone()
    residual = weights.new_full((len(weights),), math.inf)
    separated = torch.zeros_like(residual, dtype=torch.bool)
    active = torch.arange(len(weights), device=weights.device)
    is_penalised = bool(rows.penalty.any())
    for _ in range(STEPS):
        if len(active) == 0:
            break
        part = rows.take(active)
        step = part.newton_step(weights[active])
        change = part.logit_change(step).nan_to_num(nan=math.inf)
        moved = _moved(part, weights[active], step, change)
        proven = (part.log_lik(moved) > PROOF) & (not is_penalised)
        weights[active] = torch.where(proven[:, None, None], FAR * moved, moved)
        residual[active] = change.masked_fill(proven, 0)
        separated[active] = proven
        active = active[(change > tolerance) & change.isfinite() & ~proven]
    return Optimum(weights, residual, residual <= tolerance, separated)


def _follow_ridges(rows: Rows) -> Optimum:
    """Find the limit of the maximum as a small ridge penalty tends to 0.

    If weights diverge, reducing the ridge by a factor of 100 changes the logits by about log 100.
    If they do not, it changes the logits very little, and the maximum is finite but hard to reach.
    """
    start = torch.zeros_like(rows.statistic)
    before = _climb(rows.with_ridge(RIDGE / SHARE), start, RIDGE_TOLERANCE).weights
    weights, _, reached, _ = _climb(rows.with_ridge(RIDGE), before, RIDGE_TOLERANCE)
    changes = rows.log_probs(weights).exp() - rows.log_probs(before).exp()
    left = SHARE * changes.abs().amax((-1, -2))
    limit = rows.logit_change(weights - before) > -math.log(SHARE) / 2
    return Optimum(weights, left, reached & (left <= SETTLED), limit)


def _moved(rows: Rows, weights: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """Halve a step until it gains something, or is safe; rows with a singular Hessian stay."""
    safe = torch.where(change > 0, change.log1p() / change, 1.0)
    length, start = torch.ones_like(safe), rows.objective(weights)
    while True:
        moved = weights + length[:, None, None] * step
        short = (rows.objective(moved) < start) & (length > safe)
        if not short.any():
            return torch.where(moved.isfinite(), moved, weights)
        length = torch.where(short, torch.maximum(length / 2, safe), length)


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


def _outer(features: Tensor) -> Tensor:
    """Return x xᵀ of every feature vector, flattened: (..., r) to (..., r²)."""
    return (features.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)
