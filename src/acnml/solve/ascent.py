"""The true network at the weights of every label: where it may lie and how to raise its objective.

The linearised solution is where the ascent of the true objective log p_θ(y|x) + log q(θ) begins.
Up to a constant, this is F(v) = log p_θ(y|x) - ½ vᵀΣv at θ = μ + Σv. No point is kept where it is
lower than at the mean, nor a step that lowers it. Hence p_θ̂_y(y|x) ≥ p_μ(y|x) for every label, and
the regret lies between 0 and log K. F is not concave: a small residual proves a stationary point.

With gradients g_i of log p_θ(y|x), taken at points v_i, the method is a proximal bundle method
(Kiwiel 1985; Teo et al. 2010, where the quadratic term is also exact): a step leads to the maximum
of

    min_i [log p(v_i) + g_iᵀΣ(v' - v_i)] - ½ v'ᵀΣv' - (1/t - 1)/2 · (v' - v)ᵀΣ(v' - v),

which is v' = v + t (Σ_i λ_i g_i - v) for weights λ_i ≥ 0 that sum to one. One gradient gives the
paper's step. Several are needed in ReLU networks, whose optima are often at kinks, where the
gradients on all sides differ and none vanishes.

Every point is a combination of the start and the gradients so far. So all that is kept, next to
the gradients themselves, are coefficients and a Gram matrix.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from acnml._algebra.dual import Dual, combination, taken
from acnml._algebra.kernels import Kernel
from acnml._algebra.simplex import least_on_simplex, quadratic
from acnml._engine.chunks import Solved
from acnml._engine.recorder import Tape
from acnml._engine.rows import Path, Rows, inner_product

# Where the linearised solution is worse than the mean, it is halved this often, then given up.
HALVINGS = 6

# With a smaller share of rows left to improve, only these are run.
MANY = 0.5

# A step must gain this share of what is expected of it.
SHARE_OF_GAIN = 0.1

# Step sizes change by these factors, from one step to the next.
SHRINK, KEEP, GROW = 0.3, 0.9, 2.0

# The size of steps whose gain is hidden by rounding.
LONGEST_BLIND = 0.5

# Changes of the objective below this many units of rounding mean nothing.
ROUNDING = 64

# A cost that keeps a gradient out of every combination.
NEVER = 1e30


class Steps(NamedTuple):
    """Settings of the ascent, see `Linearised`."""

    most: int
    size: float
    tolerance: float


def ascended(
    rows: Rows,
    labels: Tensor,
    coefficients: Tensor,
    kernel: Kernel,
    steps: Steps,
    with_residuals: bool,
) -> Solved:
    """Run the network at μ + ΣJᵀu for the u (B, L, K) of some labels, and take steps from there."""
    wide = torch.promote_types(rows.start.logits.dtype, torch.float32)
    at_mean = rows.log_lik(rows.start.logits, labels).double()
    recorded = with_residuals or steps.most > 0
    view = _start(rows, labels, coefficients, kernel, at_mean, recorded)
    begun = partial(_Bundle.begun, rows, view, labels, steps.size)
    if steps.most == 0:
        log_lik = view.log_lik
        residual = partial(lambda begin: _residual(rows, begin()).to(wide), begun)
    else:
        log_lik, known = _climbed(rows, begun(), labels, steps.most, steps.tolerance)
        residual = partial(known.to, wide)
    # Rounding may leave the likelihood a little below that at the mean.
    return Solved(torch.maximum(log_lik, at_mean).to(wide), residual)


class _View(NamedTuple):
    """The true network at the end of a path, before any gradient."""

    path: Path
    squared: Tensor  # vᵀΣv (B, L)
    log_lik: Tensor  # (B, L)
    tape: Tape | None  # None where no gradient is wanted

    @staticmethod
    def at(rows: Rows, path: Path, squared: Tensor, labels: Tensor, recorded: bool = True) -> _View:
        """Run all rows at the end of a path."""
        tape = rows.recorded(path, labels.shape[-1]) if recorded else None
        logits = rows.logits(path, labels.shape[-1]) if tape is None else tape.logits
        return _View(path, squared, rows.log_lik(logits, labels).double(), tape)

    @property
    def objective(self) -> Tensor:
        """log p_θ(y|x) - ½ vᵀΣv."""
        return self.log_lik - self.squared / 2


def _start(
    rows: Rows,
    labels: Tensor,
    coefficients: Tensor,
    kernel: Kernel,
    at_mean: Tensor,
    recorded: bool,
) -> _View:
    """Run the network at θ = μ + ΣJᵀu, with u halved where the objective is below the mean's."""
    u = torch.where(coefficients.isfinite().all(-1, keepdim=True), coefficients, 0.0)
    squared = (kernel.mv(u) * u).sum(-1)
    dtype = rows.dtype
    view = _View.at(rows, Path.along(rows.tangent, u.to(dtype)), squared, labels, recorded)
    # Most rows of a confident network hardly move: there, rounding must not decide.
    rounding = ROUNDING * torch.finfo(rows.start.logits.dtype).eps * (1 + at_mean.abs())
    worse = ~(view.objective >= at_mean - rounding)
    if not bool(worse.any()):
        return view
    share, log_lik = _best_share(rows, labels, view, worse, at_mean)
    u, squared = share.unsqueeze(-1) * u, share**2 * squared
    squared = torch.where(share > 0, squared, 0.0)  # it may be infinite
    path = Path.along(rows.tangent, u.to(dtype))
    return (
        _View.at(rows, path, squared, labels) if recorded else _View(path, squared, log_lik, None)
    )


def _best_share(
    rows: Rows, labels: Tensor, view: _View, worse: Tensor, at_mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the share of the way from the mean, (B, L), and log p_θ(y|x) there.

    The share is 1, or less where that is worse than the mean. Halves are tried, with the rows that
    need it alone; in the end a row stays at the mean.
    """
    where = worse.nonzero(as_tuple=True)
    some, own = rows.take(where[0]), labels[where[1]].unsqueeze(1)
    v, squared = taken(where, view.path.v())[0], view.squared[where].unsqueeze(1)
    limit, share = at_mean[where].unsqueeze(1), torch.ones_like(squared)
    worse_still = torch.ones_like(squared, dtype=torch.bool)
    for _ in range(HALVINGS):
        share = torch.where(worse_still, share / 2, share)
        path = Path.to(rows.posterior, v.scaled(share.to(rows.dtype)))
        log_lik = some.log_lik(some.logits(path, 1), own).double()
        worse_still = ~(log_lik - share**2 * squared / 2 >= limit)
        if not bool(worse_still.any()):
            break
    share = torch.where(worse_still, 0.0, share)
    log_lik = torch.where(worse_still, limit, log_lik)
    return (
        torch.ones_like(at_mean).index_put(where, share.squeeze(1)),
        view.log_lik.index_put(where, log_lik.squeeze(1)),
    )


class _Bundle(NamedTuple):
    """Rows on their way up. Numbers are (B, L, ...); M points are the start and all gradients."""

    points: tuple[Dual, ...]  # v_0, where the ascent began, and gradients g_i of log p_θ(y|x)
    gram: Tensor  # (M, M) their inner products with Σ between them
    coefficients: Tensor  # (M,) of v: v = Σ_i c_i · points_i
    log_lik: Tensor  # log p_θ(y|x) at v
    latest: Tensor  # index of the gradient at v
    sources: Tensor  # (M - 1, M) coefficients of the points where the gradients were taken
    values: Tensor  # (M - 1,) log p_θ(y|x) there
    usable: Tensor  # (M - 1,) whether these gradients are finite
    size: Tensor  # t of the next step

    @staticmethod
    def begun(rows: Rows, view: _View, labels: Tensor, size: float) -> _Bundle:
        """Begin at a point where the network was run."""
        one = torch.ones_like(view.log_lik)
        begin = _Bundle(
            (view.path.v(),),
            view.squared[..., None, None],
            one[..., None],
            view.log_lik,
            torch.zeros_like(one, dtype=torch.long),
            one.new_zeros(*one.shape, 0, 1),
            one.new_zeros(*one.shape, 0),
            torch.zeros(*one.shape, 0, dtype=torch.bool, device=one.device),
            size * one,
        )
        return begin.with_gradient(rows, view, labels, begin.coefficients)

    def with_gradient(self, rows: Rows, view: _View, labels: Tensor, source: Tensor) -> _Bundle:
        """Add the gradient at another point, which has the given coefficients."""
        assert view.tape is not None
        gradient = rows.log_lik_gradient(view.tape, labels)
        moved = rows.moved(gradient)
        norm = inner_product(gradient, moved).double()
        usable = norm.isfinite() & view.log_lik.isfinite() & view.squared.isfinite()
        if not bool(usable.all()):
            gradient = gradient.where(usable)
            moved, norm = rows.moved(gradient), torch.where(usable, norm, 0.0)
        products = [inner_product(each, moved).double() for each in self.points]
        edge, points = torch.stack([*products, norm], dim=-1), (*self.points, gradient)
        gram = torch.cat([self.gram, edge[..., None, :-1]], dim=-2)
        return self._replace(
            points=points,
            gram=torch.cat([gram, edge[..., None]], dim=-1),
            coefficients=_widened(self.coefficients),
            sources=_widened(torch.cat([self.sources, source[..., None, :]], dim=-2)),
            values=torch.cat([self.values, view.log_lik[..., None]], dim=-1),
            usable=torch.cat([self.usable, usable[..., None]], dim=-1),
        )

    @property
    def squared(self) -> Tensor:
        """vᵀΣv."""
        return quadratic(self.gram, self.coefficients)

    @property
    def objective(self) -> Tensor:
        """log p_θ(y|x) - ½ vᵀΣv."""
        return self.log_lik - self.squared / 2

    def slopes(self) -> Tensor:
        """Return the inner products of all g_i - v, (M - 1, M - 1)."""
        cross = (self.gram @ self.coefficients[..., None])[..., 1:, :]  # g_iᵀΣv
        squared = self.squared[..., None, None]
        return self.gram[..., 1:, 1:] - cross - cross.mT + squared

    def distances(self) -> Tensor:
        """Return the squared distances from v to the points of the gradients, (M - 1,)."""
        apart = self.coefficients[..., None, :] - self.sources
        return ((apart @ self.gram) * apart).sum(-1).clamp(min=0)

    def at_latest(self) -> Tensor:
        """Return weights (M - 1,) that choose the gradient at v."""
        chosen = torch.arange(self.values.shape[-1], device=self.values.device)
        return (chosen == self.latest[..., None]).double()

    def where(self, rows: Tensor, other: _Bundle) -> _Bundle:
        """Return the chosen rows (B, L) of this bundle and the others of another one."""
        by_row = rows[..., None]
        return self._replace(
            coefficients=torch.where(by_row, self.coefficients, other.coefficients),
            log_lik=torch.where(rows, self.log_lik, other.log_lik),
            latest=torch.where(rows, self.latest, other.latest),
        )

    def take(self, where: tuple[Tensor, ...]) -> _Bundle:
        """Return some rows (n,), with one label each."""
        numbers = (number[where].unsqueeze(1) for number in self[1:])
        return _Bundle(tuple(taken(where, *self.points)), *numbers)


def _residual(rows: Rows, bundle: _Bundle) -> Tensor:
    """Return how far v is from an optimum, in posterior standard deviations, (B, L).

    For a single gradient it is √((g - v)ᵀΣ(g - v)). At a kink it is the least value of

        √(‖Σ_i λ_i g_i - v‖² + Σ_i λ_i ‖v_i - v‖²)

    over convex combinations of gradients: one that vanishes, of gradients at v itself.
    """
    slopes, distances = bundle.slopes(), bundle.distances()
    costs = torch.where(bundle.usable, distances, NEVER)
    weights = least_on_simplex(2 * slopes, costs, bundle.at_latest())
    least = quadratic(slopes, weights) + (weights * distances).sum(-1)
    # What rounding leaves of the difference may be more.
    eps = torch.finfo(rows.dtype).eps
    lengths = bundle.gram.diagonal(dim1=-2, dim2=-1)[..., 1:]
    rounding = eps * ((weights * lengths).sum(-1) + bundle.squared)
    found = torch.maximum(least, rounding).sqrt()
    here = (bundle.at_latest() * bundle.usable).sum(-1) > 0
    return torch.where(here, found, torch.nan)


def _climbed(
    rows: Rows, bundle: _Bundle, labels: Tensor, steps: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Take steps; return log p_θ(y|x) and residuals (B, L) of where they end."""
    known = _residual(rows, bundle)
    for step in range(steps):
        active = known > tolerance
        if not bool(active.any()):
            break
        if active.double().mean() < MANY and active.numel() > active.sum():
            where = active.nonzero(as_tuple=True)
            some, own = rows.take(where[0]), labels.expand_as(active)[where].unsqueeze(1)
            left = _climbed(some, bundle.take(where), own, steps - step, tolerance)
            pairs = zip((bundle.log_lik, known), left, strict=True)
            log_lik, known = (old.index_put(where, new.squeeze(1)) for old, new in pairs)
            return log_lik, known
        bundle = _advanced(rows, bundle, labels, active)
        known = _residual(rows, bundle)
    return bundle.log_lik, known


def _advanced(rows: Rows, old: _Bundle, labels: Tensor, active: Tensor) -> _Bundle:
    """Take one step with the active rows; those that it does not improve stay where they are.

    Either way the gradient at the new point is added, so that the next step knows more.
    """
    slopes, rounding = old.slopes(), _rounding(old, rows.dtype)
    weights, expected = _direction(old, slopes, rounding)
    tried = torch.where(active, old.size, 0.0)
    aim = torch.cat([torch.zeros_like(weights[..., :1]), weights], dim=-1)
    coefficients = torch.lerp(old.coefficients, aim, tried[..., None])
    v = combination(old.points, coefficients)
    path = Path.to(rows.posterior, v)
    view = _View.at(rows, path, quadratic(old.gram, coefficients), labels)
    new = old.with_gradient(rows, view, labels, coefficients)
    moved = new._replace(
        coefficients=_widened(coefficients),
        log_lik=view.log_lik,
        latest=torch.full_like(old.latest, new.values.shape[-1] - 1),
    )
    gain = view.objective - old.objective
    # Where rounding hides a gain, the gradient must get closer to v, or rounding hides that too.
    before, after = (quadratic(each.slopes(), each.at_latest()) for each in (old, moved))
    closer = (after < before) | (after < 4 * rounding)
    better = (gain >= SHARE_OF_GAIN * expected) | ((gain >= -rounding) & closer)
    better = active & better & new.usable[..., -1]
    hidden = quadratic(slopes, weights) < rounding
    size = _next_size(old.size, quadratic(slopes, weights), gain, better, hidden)
    return moved.where(better, new)._replace(size=size)


def _direction(bundle: _Bundle, slopes: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the gradients (M - 1,) and the gain that the model expects.

    Its dual problem is to minimise Σ_i λ_i e_i + t/2 ‖Σ_i λ_i g_i - v‖², where e_i is how far the
    tangent plane i lies above log p at v. It may lie below, because log p is not concave. Half the
    squared distance is the least that is assumed.
    """
    apart = bundle.coefficients[..., None, :] - bundle.sources
    across = ((apart @ bundle.gram)[..., 1:]).diagonal(dim1=-2, dim2=-1)  # g_iᵀΣ(v - v_i)
    errors = bundle.values + across - bundle.log_lik[..., None]
    costs = torch.maximum(errors, bundle.distances() / 2)
    costs = torch.where(bundle.usable, costs, NEVER)
    size, plain = bundle.size[..., None], bundle.at_latest()
    weights = least_on_simplex(size[..., None] * slopes, costs, plain)
    # Close to a smooth optimum, differences of gradients are rounding errors.
    smooth = quadratic(slopes, plain) < rounding
    weights = torch.where(smooth[..., None], plain, weights)
    return weights, (weights * costs).sum(-1) + bundle.size * quadratic(slopes, weights) / 2


def _next_size(size: Tensor, slope: Tensor, gain: Tensor, better: Tensor, hidden: Tensor) -> Tensor:
    """Return the step size at which a parabola through the objective's last values peaks.

    The parabola has the given slope at the old point. Where rounding hides it, keep the size, but
    for sizes with which steps along a single gradient may oscillate.
    """
    bend = 2 * (size * slope - gain) / size**2
    peak = torch.where(bend > 0, slope / bend, torch.inf).nan_to_num(0.0)
    least = torch.where(better, size / GROW, SHRINK * size)
    most = torch.where(better, GROW * size, KEEP * size)
    found = torch.minimum(torch.maximum(peak, least), most).clamp(max=1.0)
    return torch.where(better & hidden, size.clamp(max=LONGEST_BLIND), found)


def _rounding(bundle: _Bundle, dtype: torch.dtype) -> Tensor:
    """Return the change of the objective that means nothing."""
    lengths = bundle.gram.diagonal(dim1=-2, dim2=-1)[..., 1:]
    length = (bundle.at_latest() * lengths).sum(-1)
    eps = torch.finfo(dtype).eps
    return ROUNDING * eps * (1 + bundle.objective.abs() + length + bundle.squared)


def _widened(coefficients: Tensor) -> Tensor:
    """Append a zero for a new point."""
    return functional.pad(coefficients, (0, 1))
