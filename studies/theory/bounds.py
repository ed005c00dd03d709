"""The error bounds of section 3.2 of the paper for binary logistic regression, with constants.

**Notation.** θ is the weight vector of dimension D, ℓ_i(θ) = -log p_θ(y_i|x_i), and the training
objective is divided by n:

    F(θ) = (1/n)(Σ_i ℓ_i(θ) + Σ_j λ_j θ_j²),    θ̂ = argmin F,    H(θ) = ∇²F(θ) positive definite.

A query (x, y) is added with weight 1/n, and CNMAP needs θ̂_y = argmin F + ℓ_y/n. Let g_y = ∇ℓ_y and
h_y = ∇²ℓ_y be the derivatives at the query. There are two approximations without a refit:

    influence function    θ̃_y = θ̂ - H(θ̂)⁻¹ g_y(θ̂)/n                       (explicit)
    ACNML, Laplace        θ̄_y = argmin ½(θ - θ̂)ᵀH(θ̂)(θ - θ̂) + ℓ_y(θ)/n     (implicit in g_y)

H is the Hessian of a *loss*, hence the minus sign. With the Hessian of the log-likelihood, which is
negative definite, it would be a plus. One step of size 1 of the paper's ACNML iteration gives θ̃_y.

**The ball.** The curvature σ'(z) of the loss vanishes for large |z|, so the constants are computed
on a ball Ω of radius r around θ̂. There, with |Δz_i| ≤ r‖x_i‖ and σ'(z + Δ) ≥ e^{-|Δ|} σ'(z),

    C_op = sup_Ω ‖H(θ)⁻¹‖ ≤ 1 / λ_min((1/n) Σ_i e^{-r‖x_i‖} σ'(z_i) x_i x_iᵀ + (2/n) diag λ),
    sup_Ω ‖g_y‖ = σ(r‖x‖ - m_y) ‖x‖,   m_y the margin of y at θ̂,
    sup_Ω ‖h_y‖ = max σ'(z) ‖x‖²       over |z - z(θ̂)| ≤ r‖x‖.

*θ̂_y lies in Ω* if C_op sup_Ω‖g_y‖/n ≤ r, because the outward component of the gradient of the
convex F + ℓ_y/n on the sphere is at least r/C_op - sup‖g_y‖/n ≥ 0. Then
∇F(θ̂_y) - ∇F(θ̂) = -g_y(θ̂_y)/n gives

    (1)   ‖θ̂_y - θ̂‖ ≤ s := C_op sup_Ω‖g_y‖ / n,   and in the same way ‖θ̃_y - θ̂‖, ‖θ̄_y - θ̂‖ ≤ s.

**Theorem 3.1** of the paper (its appendix E) applies the theorem of Giordano et al. (A Swiss Army
Infinitesimal Jackknife, 2019), which is about reweighting N given points from weights 1. To *add* a
query, the paper takes N = n + 2 points: the training data, the query, and a counterpart with the
negative loss of the query, which cancels it at weights 1. The query's weight is then set to 2. All
means are over N, norms of stacked Hessians are root mean squares of Frobenius norms, and δ has
entrywise 1-norms:

    C_op = sup_Ω ‖(Σ_i h_i(θ) / N)⁻¹‖,        (n + 2)/n times the one above
    L_h  = (1/6√3) √((Σ_i ‖x_i‖⁶ + 2‖x‖⁶) / N),        as max |σ''| = 1/6√3,
    C_w  = ‖w‖ / √N = √((n + 5)/(n + 2)),
    δ    = max(sup_Ω ‖g_y‖₁, sup_Ω ‖h_y‖₁) / (n + 2),
    C_IJ = 1 + D C_w L_h C_op,     Δ_δ = min(r / C_op, ½ / (C_IJ C_op)),
    (2)   δ ≤ Δ_δ   ⟹   ‖θ̃_y - θ̂_y‖ ≤ 2 C_op² C_IJ δ².

The appendix has four slips. (a) Its Δ_δ has 1/n where Giordano et al. have ½; as δ is itself of
order 1/n, no query then meets the condition, however large n is. (b) The suprema that define δ are
divided by N + 2 although N is n + 2 already; Theorem 3.1 has n + 2. (c) With gradients of losses,
as the appendix says it has, the weight 2 of the *last* point removes the query instead of adding
it: the two added points are swapped. (d) In the proof of Proposition 3.2 the first inequality has
θ̂ twice; the second should be θ̃. The formulas above are the corrected ones.

**Sharper bounds by convexity.** Let H̄ and h̄_y be the mean Hessians of F and ℓ_y between θ̂ and θ̂_y,
and let L = (1/6√3) ‖(1/n) Σ_i ‖x_i‖ x_i x_iᵀ‖, so that ‖H̄ - H(θ̂)‖ ≤ L‖θ̂_y - θ̂‖/2. Expanding the
gradient of F + ℓ_y/n at θ̂ gives θ̃_y - θ̂_y = H⁻¹(H̄ - H + h̄_y/n)(θ̂_y - θ̂), hence

    (3)   ‖θ̃_y - θ̂_y‖ ≤ C_op (L s/2 + sup_Ω‖h_y‖/n) s.

For ACNML, Φ(θ) = H(θ - θ̂) + g_y(θ)/n is strongly monotone with constant 1/C_op, Φ(θ̄_y) = 0 and
Φ(θ̂_y) = (H - H̄)(θ̂_y - θ̂). The term in (3) from the query's own curvature does not appear:

    (4)   ‖θ̄_y - θ̂_y‖ ≤ C_op L s² / 2.

Bounds (3) and (4) need only r ≥ s. Bounds (2), (3) and (4) decrease like n⁻², because s and δ
decrease like 1/n.

**Proposition 3.2.** If θ_y and θ̂_y are at most ε_y apart and log p_θ(y|x) has the Lipschitz
constant L in θ, then log p(y|x) before it is normalised differs by at most L ε_y, and the logarithm
of the normaliser by at most the maximum of this over y. A logistic regression has L = ‖x‖ on the
whole space, as in the paper, and sup_Ω‖g_y‖ on the ball:

    (5)   max_y |log p(y|x) - log p_CNMAP(y|x)| ≤ 2 ‖x‖ max_y ε_y,
    (6)   max_y |log p(y|x) - log p_CNMAP(y|x)| ≤ 2 max_y sup_Ω‖g_y‖ ε_y.

(2) and (5) are the paper's. (3), (4) and (6) are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from acnml.exact import Fit, LogisticProblem

MAX_SECOND_DERIVATIVE = 1 / (6 * math.sqrt(3))  # of the logistic function σ
# Radii to try, in units of the radius needed at the centre. The smallest that suffices gives the
# tightest bounds.
RADII = (1.003, 1.01, 1.03, 1.1, *(1.25**power for power in range(1, 40)))


class Query(NamedTuple):
    """Suprema over the ball at every query, for both labels (Q, 2); not divided by n."""

    gradient: Tensor  # sup ‖g_y‖₂
    gradient_1: Tensor  # sup ‖g_y‖₁
    hessian: Tensor  # sup ‖h_y‖, its only eigenvalue
    hessian_1: Tensor  # sup ‖h_y‖₁, entrywise


class Theorem(NamedTuple):
    """The constants of Theorem 3.1, in the paper's form: N = n + 2 points."""

    points: int  # N
    dimension: int  # D
    radius: float  # r, Giordano's Δ_θ
    inverse_hessian: float  # C_op, of means over N points
    rms_lipschitz: Tensor  # L_h (Q, 1)
    query: Query

    @property
    def weight_norm(self) -> float:
        """C_w, with the query at weight 2 and all other points at 1."""
        return math.sqrt((self.points + 3) / self.points)

    @property
    def delta(self) -> Tensor:
        """δ of every query and label (Q, 2)."""
        return torch.maximum(self.query.gradient_1, self.query.hessian_1) / self.points

    @property
    def complexity(self) -> Tensor:
        """The constant C_IJ (Q, 1)."""
        lipschitz = self.weight_norm * self.rms_lipschitz
        return 1 + self.dimension * lipschitz * self.inverse_hessian

    def largest_delta(self, share: float) -> Tensor:
        """Δ_δ (Q, 1), the largest δ for which the theorem holds; `share` is its factor ½."""
        inverse = self.inverse_hessian
        return (share / (self.complexity * inverse)).clamp(max=self.radius / inverse)


class Constants(NamedTuple):
    """The constants of the sharper bounds on a ball around the training solution."""

    n: int
    radius: float  # r
    inverse_hessian: float  # C_op
    mean_lipschitz: float  # L
    query: Query

    @property
    def shift(self) -> Tensor:
        """s of (1), a bound on how far a refit moves (Q, 2)."""
        return self.inverse_hessian * self.query.gradient / self.n


class Bounds(NamedTuple):
    """Bounds on the distance to θ̂_y for every query and label (Q, 2); inf if none is proven."""

    influence: Tensor  # (3)
    acnml: Tensor  # (4)


def influence_estimate(problem: LogisticProblem, found: Fit, queries: Tensor) -> Tensor:
    """Return θ̃_y = θ̂ - H⁻¹ g_y(θ̂)/n for both labels of every query (Q, 2, D)."""
    p = torch.sigmoid(queries @ found.weights[1])
    return _moved(problem, found, queries, torch.stack([p, p - 1], dim=-1))


def acnml_estimate(
    problem: LogisticProblem, found: Fit, queries: Tensor, log_lik: Tensor
) -> Tensor:
    """Return θ̄_y (Q, 2, D) from ACNML's log p_θ̄_y(y|x) (Q, 2).

    Stationarity implies θ̄_y = θ̂ - H⁻¹ g_y(θ̄_y)/n, and g_y is (p(1|x) - y) x. The likelihood that
    ACNML returns therefore determines θ̄_y.
    """
    missing = -torch.expm1(log_lik)  # 1 - p(y|x)
    return _moved(problem, found, queries, torch.stack([missing[:, 0], -missing[:, 1]], dim=-1))


def theorem_constants(problem: LogisticProblem, found: Fit, queries: Tensor) -> Theorem:
    """Return the constants for (2), on the smallest ball with C_op δ ≤ r."""
    _require_binary(problem)
    x, points = problem.features, len(problem.features) + 2
    sixth = (x.norm(dim=-1).pow(6).sum() + 2 * queries.norm(dim=-1, keepdim=True).pow(6)) / points

    def on_ball(radius: float) -> Theorem:
        return Theorem(
            points=points,
            dimension=x.shape[1],
            radius=radius,
            inverse_hessian=_inverse_hessian(problem, found, radius) * points / len(x),
            rms_lipschitz=MAX_SECOND_DERIVATIVE * sixth.sqrt(),
            query=_query(queries, found.weights[1], radius),
        )

    return _smallest_ball(on_ball, lambda c: c.inverse_hessian * c.delta.max().item())


def convex_constants(problem: LogisticProblem, found: Fit, queries: Tensor) -> Constants:
    """Return the constants for (3), (4) and (6), on the smallest ball with s ≤ r."""
    _require_binary(problem)
    x = problem.features
    mean = (x.mT * x.norm(dim=-1)) @ x / len(x)

    def on_ball(radius: float) -> Constants:
        return Constants(
            n=len(x),
            radius=radius,
            inverse_hessian=_inverse_hessian(problem, found, radius),
            mean_lipschitz=MAX_SECOND_DERIVATIVE * torch.linalg.eigvalsh(mean)[-1].item(),
            query=_query(queries, found.weights[1], radius),
        )

    return _smallest_ball(on_ball, lambda c: c.shift.max().item())


def theorem_bound(c: Theorem, share: float = 0.5) -> Tensor:
    """Return bound (2) for every query and label (Q, 2); infinite if its condition fails.

    `share` is the factor ½ in Δ_δ, for which the paper prints 1/n.
    """
    bound = 2 * c.inverse_hessian**2 * c.complexity * c.delta**2
    return torch.where(c.delta <= c.largest_delta(share), bound, math.inf)


def convex_bounds(c: Constants) -> Bounds:
    """Return bounds (3) and (4) for every query and label; infinite if s > r."""
    curvature = c.mean_lipschitz * c.shift / 2
    influence = c.inverse_hessian * (curvature + c.query.hessian / c.n) * c.shift
    acnml = c.inverse_hessian * curvature * c.shift
    inside = c.shift <= c.radius
    return Bounds(torch.where(inside, influence, math.inf), torch.where(inside, acnml, math.inf))


def proposition_bound(queries: Tensor, parameter_bound: Tensor) -> Tensor:
    """Return bound (5), the paper's, for every query (Q,), given bounds on the parameters."""
    return 2 * queries.norm(dim=-1) * parameter_bound.amax(-1)


def log_prob_bound(c: Constants, parameter_bound: Tensor) -> Tensor:
    """Return bound (6) for every query (Q,), given bounds ε_y on the parameters (Q, 2)."""
    return 2 * (c.query.gradient * parameter_bound).amax(-1)


Ball = TypeVar("Ball", Theorem, Constants)


def _smallest_ball(on_ball: Callable[[float], Ball], needed: Callable[[Ball], float]) -> Ball:
    """Return the constants on the smallest ball whose radius is at least `needed(constants)`.

    The needed radius grows with the ball. If none of the balls tried is large enough, the constants
    on the last one are returned, and its bounds are infinite.
    """
    chosen = on_ball(0.0)
    unit = needed(chosen)
    for factor in RADII:
        chosen = on_ball(factor * unit)
        if needed(chosen) <= chosen.radius:
            break
    return chosen


def _moved(problem: LogisticProblem, found: Fit, queries: Tensor, residual: Tensor) -> Tensor:
    """Return θ̂ - H⁻¹ (p(1|x) - y) x / n for residuals p(1|x) - y (Q, 2)."""
    _require_binary(problem)
    theta = found.weights[1]
    moved = torch.linalg.solve(_hessian(problem, theta, 0.0), queries.mT).mT  # H⁻¹x (Q, D)
    return theta - residual.unsqueeze(-1) * moved.unsqueeze(-2) / len(problem.features)


def _inverse_hessian(problem: LogisticProblem, found: Fit, radius: float) -> float:
    """Return a bound of ‖H⁻¹‖ on the ball."""
    smallest = torch.linalg.eigvalsh(_hessian(problem, found.weights[1], radius))[0]
    return 1 / smallest.item()


def _query(queries: Tensor, theta: Tensor, radius: float) -> Query:
    logits, length, length_1 = queries @ theta, queries.norm(dim=-1), queries.norm(1, dim=-1)
    margins = torch.stack([-logits, logits], dim=-1)  # of label 0 and 1
    residual = torch.sigmoid((radius * length).unsqueeze(-1) - margins)
    nearest = (logits.abs() - radius * length).clamp(min=0)  # σ' falls with |z|
    slope = (torch.sigmoid(nearest) * torch.sigmoid(-nearest)).unsqueeze(-1).expand_as(residual)
    wide, wide_1 = length.unsqueeze(-1), length_1.unsqueeze(-1)
    return Query(residual * wide, residual * wide_1, slope * wide**2, slope * wide_1**2)


def _hessian(problem: LogisticProblem, theta: Tensor, radius: float) -> Tensor:
    """Return a lower bound of H on the ball of this radius around θ; for radius 0, H itself."""
    x, n = problem.features, len(problem.features)
    p = torch.sigmoid(x @ theta)
    weights = p * (1 - p) * torch.exp(-radius * x.norm(dim=-1))
    return ((x.mT * weights) @ x + 2 * problem.penalty.diag()) / n


def _require_binary(problem: LogisticProblem) -> None:
    if problem.classes != 2:
        raise ValueError(f"the bounds are for 2 classes, but the problem has {problem.classes}")
