"""The true network at the weights of every label: where it may lie and how to raise its objective.

The linearised solution is where the ascent of the true objective log p_θ(y|x) + log q(θ) begins.
Up to a constant, this is F(v) = log p_θ(y|x) - ½ vᵀΣv at θ = μ + Σv. No point is kept where it is
lower than at the mean, nor a step that lowers it. Hence p_θ̂_y(y|x) ≥ p_μ(y|x) for every label, and
the regret lies between 0 and log K. F is not concave: a small residual proves a stationary point.

With the gradient g of log p_θ(y|x), the preconditioned gradient of F is g - v, and a step leads to
v + t(g - v). That is the paper's step, with a size t of every row's own. Every point is a
combination of the start and the gradients so far. So all that is kept, next to the gradients
themselves, are coefficients and a Gram matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acnml._algebra.dual import Dual, combination
from acnml._engine.recorder import Tape
from acnml._engine.rows import Rows, inner_product

# Where the linearised solution is worse than the mean, it is halved this often, then given up.
HALVINGS = 6

# A step must gain this share of what its slope promises.
SHARE_OF_SLOPE = 0.05

# Step sizes change by these factors at most, from one step to the next.
SHRINK, GROW = 0.3, 2.0

# The size of steps whose gain is hidden by rounding.
BLIND = 0.5

# Changes of the objective below this many units of rounding mean nothing.
ROUNDING = 64


class Ascent(NamedTuple):
    """Settings of the ascent, see `Linearised`."""

    steps: int
    step_size: float
    tolerance: float

    def run(
        self, rows: Rows, labels: Tensor, u: Tensor, kernel: Tensor, with_residuals: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the network at μ + ΣJᵀu for the u (B, L, K) of some labels, and take steps.

        Return log-likelihoods and, if they are asked for, residuals (B, L).
        """
        wide = torch.promote_types(rows.start.logits.dtype, torch.float32)
        at_mean = rows.log_lik(rows.start.logits, labels).double()
        recorded = with_residuals or self.steps > 0
        start = _start(rows, labels, u, kernel, at_mean, recorded)
        end = self._climbed(rows, start, labels) if recorded else None
        log_lik = start.log_lik if end is None else end.log_lik
        # Rounding may leave the likelihood a little below that at the mean.
        return torch.maximum(log_lik, at_mean).to(wide), None if end is None else end.residual.to(
            wide
        )

    def _climbed(self, rows: Rows, start: _Start, labels: Tensor) -> _Climb:
        """Take steps; rows that a step does not improve stay and try a shorter one."""
        climb = _Climb.begun(rows, start, labels)
        size = torch.full_like(climb.log_lik, self.step_size)
        for _ in range(self.steps):
            active = climb.residual > self.tolerance
            if not bool(active.any()):
                break
            slope, rounding = climb.slope, climb.rounding
            new, usable = _stepped(rows, climb, labels, torch.where(active, size, 0.0))
            gain = new.objective - climb.objective
            # Where rounding hides a gain, the slope must fall.
            unclear = (gain >= -rounding) & ((new.slope < slope) | (new.slope < 4 * rounding))
            better = active & usable & ((gain >= SHARE_OF_SLOPE * size * slope) | unclear)
            climb = _chosen(better, new, climb)
            size = _next_size(size, slope, gain, better)
            size = torch.where(better & (slope < rounding), BLIND, size)
        return climb


class _Start(NamedTuple):
    """The true network at μ + Σv, before any gradient."""

    v: Dual
    squared: Tensor  # vᵀΣv (B, L)
    log_lik: Tensor  # (B, L)
    tape: Tape | None  # None where no gradient is wanted


def _start(
    rows: Rows,
    labels: Tensor,
    coefficients: Tensor,
    kernel: Tensor,
    at_mean: Tensor,
    recorded: bool,
) -> _Start:
    """Run the network at θ = μ + ΣJᵀu, with u halved where the objective is below the mean's."""
    u = torch.where(coefficients.isfinite().all(-1, keepdim=True), coefficients, 0.0)
    squared = ((u @ kernel) * u).sum(-1)

    def at(share: Tensor) -> _Start:
        v = rows.pulled(share.unsqueeze(-1) * u)
        tape = rows.recorded(v, len(labels)) if recorded else None
        logits = rows.logits(v, len(labels)) if tape is None else tape.logits
        left = torch.where(share > 0, share**2 * squared, 0.0)  # it may be infinite
        return _Start(v, left, rows.log_lik(logits, labels).double(), tape)

    # Most rows of a confident network hardly move: there, rounding must not decide.
    rounding = ROUNDING * torch.finfo(rows.start.logits.dtype).eps * (1 + at_mean.abs())
    share = torch.ones_like(at_mean)
    found = at(share)
    for shorter in (*HALVINGS * [0.5], 0.0):
        worse = ~(found.log_lik - found.squared / 2 >= at_mean - rounding)
        if not bool(worse.any()):
            break
        share = torch.where(worse, shorter * share, share)
        found = at(share)
    return found


class _Climb(NamedTuple):
    """Rows on their way up. Numbers are (B, L, ...); M points are the start and all gradients."""

    points: tuple[Dual, ...]  # v_0, where the ascent began, and gradients of log p_θ(y|x)
    gram: Tensor  # (M, M) their inner products with Σ between them
    coefficients: Tensor  # (M,) of v: v = Σ_i c_i · points_i
    latest: Tensor  # (M,) 1 for the gradient g at v
    log_lik: Tensor  # log p_θ(y|x) at v
    eps: float  # a unit of rounding

    @staticmethod
    def begun(rows: Rows, start: _Start, labels: Tensor) -> _Climb:
        """Begin at a point where the network was run."""
        one = torch.ones_like(start.log_lik)[..., None]
        squared = start.squared[..., None, None]
        eps = torch.finfo(rows.dtype).eps
        alone = _Climb((start.v,), squared, one, one, start.log_lik, eps)
        assert start.tape is not None
        climb, usable = alone.with_gradient(rows, start.tape, labels)
        latest = torch.where(usable[..., None], climb.newest(), torch.nan)
        return climb._replace(latest=latest)

    def with_gradient(self, rows: Rows, tape: Tape, labels: Tensor) -> tuple[_Climb, Tensor]:
        """Add the gradient on a tape to the points, and say for which rows it is finite."""
        gradient = rows.log_lik_gradient(tape, labels)
        moved = rows.moved(gradient)
        norm = inner_product(gradient, moved).double()
        usable = norm.isfinite()
        if not bool(usable.all()):
            gradient = gradient.where(usable)
            moved, norm = rows.moved(gradient), torch.where(usable, norm, 0.0)
        products = [inner_product(each, moved).double() for each in self.points]
        edge = torch.stack([*products, norm], dim=-1)
        gram = torch.cat([self.gram, edge[..., None, :-1]], dim=-2)
        extended = self._replace(
            points=(*self.points, gradient),
            gram=torch.cat([gram, edge[..., None]], dim=-1),
            coefficients=functional.pad(self.coefficients, (0, 1)),
            latest=functional.pad(self.latest, (0, 1)),
        )
        return extended, usable

    def newest(self) -> Tensor:
        """Return weights (M,) that choose the last gradient."""
        zeros = torch.zeros_like(self.coefficients[..., 1:])
        return functional.pad(zeros, (0, 1), value=1.0)

    @property
    def squared(self) -> Tensor:
        """vᵀΣv."""
        return _quadratic(self.gram, self.coefficients)

    @property
    def slope(self) -> Tensor:
        """(g - v)ᵀΣ(g - v), the slope of F along g - v."""
        return _quadratic(self.gram, self.latest - self.coefficients)

    @property
    def objective(self) -> Tensor:
        """log p_θ(y|x) - ½ vᵀΣv."""
        return self.log_lik - self.squared / 2

    @property
    def lengths(self) -> Tensor:
        """vᵀΣv + gᵀΣg: the slope is a difference of such numbers."""
        return self.squared + _quadratic(self.gram, self.latest)

    @property
    def rounding(self) -> Tensor:
        """A change of the objective, or of the slope, that means nothing."""
        return ROUNDING * self.eps * (1 + self.log_lik.abs() + self.lengths)

    @property
    def residual(self) -> Tensor:
        """How far v is from a stationary point, in posterior standard deviations, (B, L)."""
        return torch.maximum(self.slope, self.eps * self.lengths).sqrt()


def _stepped(rows: Rows, old: _Climb, labels: Tensor, size: Tensor) -> tuple[_Climb, Tensor]:
    """Take a step of every row, and say for which rows all is finite."""
    coefficients = torch.lerp(old.coefficients, old.latest.nan_to_num(0.0), size[..., None])
    tape = rows.recorded(combination(old.points, coefficients), len(labels))
    log_lik = rows.log_lik(tape.logits, labels).double()
    moved = old._replace(coefficients=coefficients, log_lik=log_lik)
    new, usable = moved.with_gradient(rows, tape, labels)
    return new._replace(latest=new.newest()), usable & log_lik.isfinite()


def _chosen(rows: Tensor, new: _Climb, old: _Climb) -> _Climb:
    """Return the chosen rows (B, L) as they are after a step, and the others as before."""
    by_row = rows[..., None]
    return new._replace(
        coefficients=new.coefficients.where(by_row, functional.pad(old.coefficients, (0, 1))),
        latest=new.latest.where(by_row, functional.pad(old.latest, (0, 1))),
        log_lik=new.log_lik.where(rows, old.log_lik),
    )


def _next_size(size: Tensor, slope: Tensor, gain: Tensor, better: Tensor) -> Tensor:
    """Return the step size at which a parabola through the objective's last values peaks."""
    bend = 2 * (size * slope - gain) / size**2
    peak = torch.where(bend > 0, slope / bend, torch.inf).nan_to_num(0.0)
    least = torch.where(better, size / GROW, SHRINK * size)
    most = torch.where(better, GROW * size, size / GROW)
    return torch.minimum(torch.maximum(peak, least), most).clamp(max=1.0)


def _quadratic(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return xᵀAx, not below zero."""
    product = (matrix @ vector[..., None]).squeeze(-1)
    return (product * vector).sum(-1).clamp(min=0)
