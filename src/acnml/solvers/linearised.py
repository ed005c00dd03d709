"""Linearised: solve the problem with the logits linear in the weights, then look at the network.

The linearised solution is where the ascent of the true objective log p_θ(y|x) + log q(θ) begins.
Up to a constant, the objective is log p_θ(y|x) - ½ vᵀΣv at θ = μ + Σv. No point is kept where it is
lower than at the mean, nor a step that lowers it. Hence p_θ̂_y(y|x) ≥ p_μ(y|x) for every label, and
the regret lies between 0 and log K.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.actions import Displacement
from acnml._algebra.dual import Affine, Dual, aligned, blended, taken
from acnml._algebra.kernels import Kernel
from acnml._algebra.newton import solve_logits
from acnml._engine import chunks
from acnml._engine.chunks import Solved, label_chunks
from acnml._engine.recorder import Tape
from acnml._engine.rows import Path, Rows, inner_product
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml._util.memory import require_memory
from acnml.classifier import Classifier
from acnml.head.features import Features, features, only_linear
from acnml.head.solve import HeadSolution, Precision, solve_head
from acnml.posteriors import Posterior
from acnml.solvers.base import UNSOLVED, Solution, UnsolvedError

# Where the linearised solution is worse than the mean, it is halved this often, then given up.
HALVINGS = 6

# With a smaller share of rows left to improve, only these are run.
MANY = 0.5

# A step must gain this share of what the slope promises.
SHARE_OF_SLOPE = 0.1

# A step at most this long, in posterior standard deviations, that does not improve a row has
# crossed a kink. The residual of a solution is the least norm of a combination of gradients this
# close to it.
KINK = 0.1

# Step sizes change by these factors at most, from one step to the next.
SHRINK, GROW = 0.1, 2.0

# Changes of the objective below this many units of rounding mean nothing.
ROUNDING = 64


@final
@dataclass(frozen=True)
class Linearised:
    """Linearise, solve, then evaluate: one Jacobian, Newton steps in logit space, one pass.

    The true network is evaluated at the solution θ = μ + ΣJᵀu of the linearised problem, or closer
    to the mean where the objective is lower there. Gradient steps may follow (`polish`). Where a
    posterior covers only a last Linear layer, the network is linear in it and the solution exact.

    Args:
        polish: gradient steps at most that start at the linearised solution; 0 takes it as it is.
            A step that does not raise the objective is taken back, and a shorter one follows.
        step_size: the first of those steps; later ones follow from how the objective changes.
        polish_tolerance: rows with this residual, see `Solution`, are not polished any further.
        tolerance: largest residual of the linearised problem.
        newton_steps: but never more Newton steps than this.
        negligible: with more than 64 classes and a last-layer posterior, labels are not solved for
            that add this much to C(x) at most, all together, by a bound that `Solution` reports.
        memory: bytes that the rows solved at once may take; a share of what is free by default.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_kfac_laplace(classifier, torch.randn(100, 4))
    >>> solution = acnml.Linearised()(classifier, posterior, torch.randn(5, 4))
    >>> bool(solution.solved.all())
    True
    """

    polish: int = 0
    step_size: float = 0.5
    polish_tolerance: float = UNSOLVED / 2
    tolerance: float = 1e-6
    newton_steps: int = 50
    negligible: float = 1e-3
    memory: int | None = None

    def __post_init__(self) -> None:
        checks.settle_integers(self, polish=None, newton_steps=None)
        if self.polish < 0 or self.newton_steps < 1:
            raise ValueError(f"polish must be ≥ 0 and newton_steps ≥ 1, got {self}")
        checks.require_positive(self.step_size, "step_size")
        checks.require_positive(self.polish_tolerance, "polish_tolerance")
        checks.require_positive(self.tolerance, "tolerance")
        require_memory(self.memory)
        if not isinstance(self.negligible, numbers.Real) or not self.negligible >= 0:
            raise ValueError(f"negligible must be a number ≥ 0, got {self.negligible!r}")

    @property
    def n_gradients(self) -> int:
        """The number of gradients that a row's v is a sum of."""
        return 1 + self.polish

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""
        return "lower alpha, or use a narrower posterior"

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        found = self._last_layer(classifier, posterior, x)
        return found or chunks.solution(self, classifier, posterior, x)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution, without a last gradient for residuals."""
        found = self._last_layer(classifier, posterior, x)
        return found.log_lik if found else chunks.log_lik(self, classifier, posterior, x)

    def solve(self, rows: Rows, n_labels: int) -> Iterator[Solved]:
        """Solve for all labels of a chunk of inputs, at most `n_labels` at a time."""
        logits = rows.start.logits[:, 0].detach().double()
        # In double precision: large kernels need more digits than single precision has.
        kernel = rows.kernel().double()
        what = "the covariances of the logits are"
        checks.require_finite(kernel.diagonal(), what, self.remedy, UnsolvedError)
        wide = torch.promote_types(rows.start.logits.dtype, torch.float32)
        for labels in label_chunks(rows, n_labels):
            found = solve_logits(logits, kernel, labels, self.tolerance, self.newton_steps)
            at_mean = rows.log_lik(rows.start.logits, labels).double()
            view = _start(rows, labels, found.coefficients, kernel, at_mean)
            if self.polish == 0:
                log_lik, residual = view.log_lik, partial(_residual, rows, view, labels, wide)
            else:
                point = _Point.at(rows, view, labels, torch.full_like(at_mean, self.step_size))
                log_lik, known = _climbed(
                    rows, point.joined(), labels, self.polish, self.polish_tolerance
                )
                residual = partial(known.to, wide)
            # Rounding may leave the likelihood a little below that at the mean.
            yield Solved(torch.maximum(log_lik, at_mean).to(wide), residual)

    def _last_layer(
        self, classifier: Classifier, posterior: Posterior, x: Inputs
    ) -> Solution | None:
        """Solve in logit space if the posterior covers the last layer alone, else return None."""
        layer = only_linear(classifier, posterior.mean)
        found = None if layer is None else features(classifier, layer, x, posterior.mean)
        if layer is None or found is None:
            return None
        return self.solve_features(found, posterior, layer.layer, classifier.temperature)

    def solve_features(
        self,
        found: Features,
        posterior: Posterior,
        layer: Affine,
        temperature: float,
        scale: Tensor | None = None,
    ) -> Solution:
        """Solve for every label of inputs with known features of the last layer.

        The scale (B,) multiplies the posterior's covariance, for every input by its own number.
        """
        kernel = posterior.output_kernel(layer, found.inputs.to(posterior.dtype))
        kernel = kernel.scaled(temperature**-2).double()
        kernel = kernel if scale is None else kernel.scaled(scale.double())
        precision = Precision(self.tolerance, self.newton_steps, self.negligible)
        # A row needs some twenty vectors of K numbers in double precision.
        rows = None if self.memory is None else max(1, self.memory // (160 * found.logits.shape[1]))
        solved = solve_head(found.logits.double(), kernel, precision, rows)
        self._require_solved(solved)
        wide = torch.promote_types(found.logits.dtype, torch.float32)
        log_lik, residual, omitted = (tensor.to(wide) for tensor in solved)
        return Solution(log_lik, residual, omitted, (residual <= UNSOLVED) | (omitted > 0))

    def _require_solved(self, solution: HeadSolution) -> None:
        """Refuse rows that Newton left far from the optimum of a problem that has one."""
        limit = max(UNSOLVED, self.tolerance)
        unsolved = ~((solution.residual <= limit) | (solution.omitted > 0))
        rows = unsolved.any(1).nonzero().flatten().tolist()
        if rows:
            raise UnsolvedError(
                f"the linearised problem is not solved after {self.newton_steps} Newton steps: a "
                f"residual of {solution.residual[unsolved].max().item():.2g} is left",
                rows,
                len(unsolved),
                self.remedy,
            )


# Ascent of the true objective --------------------------------------------------------------------


class _View(NamedTuple):
    """The true network at the end of a path, before any gradient."""

    path: Path
    squared: Tensor  # vᵀΣv (B, L)
    tape: Tape
    log_lik: Tensor  # (B, L)

    @staticmethod
    def at(rows: Rows, path: Path, squared: Tensor, labels: Tensor) -> _View:
        """Run all rows at the end of a path."""
        tape = rows.recorded(path, labels.shape[-1])
        return _View(path, squared, tape, rows.log_lik(tape.logits, labels).double())

    @property
    def objective(self) -> Tensor:
        """log p_θ(y|x) - ½ vᵀΣv."""
        return self.log_lik - self.squared / 2


class _Point(NamedTuple):
    """Rows on their way up, all that the next step needs. Numbers are (B, L)."""

    v: Dual
    moved: Displacement  # Σv
    gradient: Dual  # g = ∇log p_θ(y|x), or a combination of gradients next to a kink
    moved_gradient: Displacement  # Σg
    log_lik: Tensor
    objective: Tensor
    squared: Tensor  # vᵀΣv
    cross: Tensor  # vᵀΣg
    length: Tensor  # gᵀΣg
    residual: Tensor  # √((g - v)ᵀΣ(g - v)); its square is the objective's slope along g - v
    size: Tensor  # of the next step

    @staticmethod
    def at(rows: Rows, view: _View, labels: Tensor, size: Tensor) -> _Point:
        """Compute the gradient from a run of the network."""
        gradient = rows.log_lik_gradient(view.tape, labels)
        moved = rows.posterior.displacement(gradient)
        cross = inner_product(gradient, view.path.moved).double()
        length = inner_product(gradient, moved).double()
        residual = _norm(length, cross, view.squared, rows.posterior.dtype)
        numbers = view.log_lik, view.objective, view.squared, cross, length, residual, size
        return _Point(view.path.v(), view.path.moved, gradient, moved, *numbers)

    def joined(self) -> _Point:
        """Write v and g over the same outer products: a v that steps along g does not grow."""
        v, gradient = aligned(self.v, self.gradient)
        return self._replace(v=v, gradient=gradient)

    def stepped(self, size: Tensor) -> tuple[Dual, Tensor]:
        """Return v + size · (g - v) and its squared norm."""
        kept = 1 - size
        squared = kept**2 * self.squared + 2 * size * kept * self.cross + size**2 * self.length
        return blended(self.v, self.gradient, size), squared

    def take(self, rows: Rows, where: tuple[Tensor, ...]) -> _Point:
        """Return some rows (n,), with one label each."""
        v, gradient = taken(where, self.v, self.gradient)
        moved = (rows.posterior.displacement(each) for each in (v, gradient))
        numbers = (number[where].unsqueeze(1) for number in self[4:])
        return _Point(v, next(moved), gradient, next(moved), *numbers)


def _norm(length: Tensor, cross: Tensor, squared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return √((g - v)ᵀΣ(g - v)), or what rounding leaves of the difference if that is more."""
    rounding = torch.finfo(dtype).eps * (length + squared)
    return torch.maximum(length - 2 * cross + squared, rounding).sqrt()


def _start(
    rows: Rows, labels: Tensor, coefficients: Tensor, kernel: Kernel, at_mean: Tensor
) -> _View:
    """Run the network at θ = μ + ΣJᵀu, with u halved where the objective is below the mean's."""
    u = torch.where(coefficients.isfinite().all(-1, keepdim=True), coefficients, 0.0)
    squared = (kernel.mv(u) * u).sum(-1)
    dtype = rows.posterior.dtype
    view = _View.at(rows, Path.along(rows.tangent, u.to(dtype)), squared, labels)
    worse = ~(view.objective >= at_mean)
    if not bool(worse.any()):
        return view
    share = _best_share(rows, labels, view, worse, at_mean)
    u, squared = share.unsqueeze(-1) * u, share**2 * squared
    squared = torch.where(share > 0, squared, 0.0)  # it may be infinite
    return _View.at(rows, Path.along(rows.tangent, u.to(dtype)), squared, labels)


def _best_share(rows: Rows, labels: Tensor, view: _View, worse: Tensor, at_mean: Tensor) -> Tensor:
    """Return the share of the way from the mean, (B, L): 1, or less where that is worse.

    Halves are tried, with the rows that need it alone; in the end a row stays at the mean.
    """
    where = worse.nonzero(as_tuple=True)
    some, own = rows.take(where[0]), labels[where[1]].unsqueeze(1)
    v, squared = taken(where, view.path.v())[0], view.squared[where].unsqueeze(1)
    limit, share = at_mean[where].unsqueeze(1), torch.ones_like(squared)
    worse_still = torch.ones_like(squared, dtype=torch.bool)
    for _ in range(HALVINGS):
        share = torch.where(worse_still, share / 2, share)
        path = Path.to(rows.posterior, v.scaled(share.to(rows.posterior.dtype)))
        log_lik = some.log_lik(some.logits(path, 1), own).double()
        worse_still = ~(log_lik - share**2 * squared / 2 >= limit)
        if not bool(worse_still.any()):
            break
    share = torch.where(worse_still, 0.0, share)
    return torch.ones_like(at_mean).index_put(where, share.squeeze(1))


def _residual(rows: Rows, view: _View, labels: Tensor, dtype: torch.dtype) -> Tensor:
    return _Point.at(rows, view, labels, torch.ones_like(view.log_lik)).residual.to(dtype)


def _climbed(
    rows: Rows, point: _Point, labels: Tensor, steps: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Take steps v ← v + ε(g - v); return log p_θ(y|x) and residuals (B, L) of where they end."""
    for step in range(steps):
        active = (point.residual > tolerance) & point.residual.isfinite()
        if not bool(active.any()):
            break
        if active.double().mean() < MANY and active.numel() > active.sum():
            where = active.nonzero(as_tuple=True)
            some, own = rows.take(where[0]), labels.expand_as(active)[where].unsqueeze(1)
            left = _climbed(some, point.take(rows, where), own, steps - step, tolerance)
            known = (point.log_lik, point.residual)
            pairs = zip(known, left, strict=True)
            log_lik, residual = (old.index_put(where, new.squeeze(1)) for old, new in pairs)
            return log_lik, residual
        point = _advanced(rows, point, labels, active)
    return point.log_lik, point.residual


def _advanced(rows: Rows, point: _Point, labels: Tensor, active: Tensor) -> _Point:
    """Take one step with the active rows; those that it does not improve stay where they are.

    Those that stay although the step was short are at a kink, as ReLU networks have them: the
    gradients on its two sides differ, and neither leads up. They go on with a convex combination
    of both, the one whose direction is steepest (an aggregate of a bundle method).
    """
    tried = torch.where(active, point.size, 0.0)
    v, squared = point.stepped(tried)
    view = _View.at(rows, Path.to(rows.posterior, v), squared, labels)
    new = _Point.at(rows, view, labels, point.size)
    rounding = _rounding(point, rows.posterior.dtype)
    better = active & _improved(new, point, SHARE_OF_SLOPE * tried * point.residual**2, rounding)
    new = new._replace(size=_next_size(new, point, better, rounding))
    if bool(better.all()):
        return new.joined()
    usable = new.length.isfinite() & new.cross.isfinite()
    short = active & ~better & usable & (tried * point.residual <= KINK)
    return _mixed(rows, point, new, tried, better, short)


def _mixed(
    rows: Rows, old: _Point, new: _Point, tried: Tensor, better: Tensor, short: Tensor
) -> _Point:
    """Let the better rows go on from the new point, the others from the old one.

    After a short step the gradient a of the old point and b of the new one are combined. The share
    λ for which (1 - λ)a + λb is closest to v minimises a parabola.
    """
    fresh = new.gradient.where(better | short)
    both = inner_product(fresh, old.moved_gradient).double()  # aᵀΣb
    other = inner_product(fresh, old.moved).double()  # vᵀΣb
    apart = old.length - 2 * both + new.length
    share = (old.length - old.cross - both + other) / apart
    share = torch.where(short, share.nan_to_num(0.0).clamp(0, 1), 0.0)
    kept = 1 - share
    length = kept**2 * old.length + 2 * kept * share * both + share**2 * new.length
    cross = kept * old.cross + share * other
    combined = old._replace(
        length=torch.where(share > 0, length, old.length),
        cross=torch.where(share > 0, cross, old.cross),
        # With a new direction the old step size is worth another try.
        size=torch.where(share > SHRINK, old.size, new.size),
    )
    residual = _norm(combined.length, combined.cross, combined.squared, rows.posterior.dtype)
    combined = combined._replace(residual=torch.where(share > 0, residual, old.residual))
    numbers = (torch.where(better, a, b) for a, b in zip(new[4:], combined[4:], strict=True))
    v, _ = old.stepped(torch.where(better, tried, 0.0))
    v, gradient, fresh = aligned(v, old.gradient, fresh)
    gradient = blended(gradient, fresh, torch.where(better, 1.0, share))
    moved = (rows.posterior.displacement(each) for each in (v, gradient))
    return _Point(v, next(moved), gradient, next(moved), *numbers)


def _improved(new: _Point, old: _Point, gain: Tensor, rounding: Tensor) -> Tensor:
    """Whether a row's objective rose enough or, where rounding hides that, its residual shrank."""
    # A residual this small is rounding too: its square is a sum of four larger numbers.
    shrank = (new.residual < old.residual) | (new.residual**2 < 4 * rounding)
    return (new.objective >= old.objective + gain) | (
        (new.objective >= old.objective - rounding) & shrank
    )


def _next_size(new: _Point, old: _Point, better: Tensor, rounding: Tensor) -> Tensor:
    """Return the step size at which a parabola through the objective's last values peaks.

    The parabola has the slope r² at the old point, r being its residual.
    """
    slope, size = old.residual**2, old.size
    bend = 2 * (old.objective + size * slope - new.objective) / size**2
    peak = torch.where(bend > 0, slope / bend, torch.inf).nan_to_num(0.0)
    most = torch.where(better, GROW * size, size / 2)
    found = torch.minimum(torch.maximum(peak, SHRINK * size), most).clamp(max=1.0)
    return torch.where(better & (slope < rounding), size, found)


def _rounding(point: _Point, dtype: torch.dtype) -> Tensor:
    """Return the change of the objective that means nothing."""
    eps = torch.finfo(dtype).eps
    return ROUNDING * eps * (1 + point.objective.abs() + point.length + point.squared)
