"""Raising φ for many rows at once: directions, step sizes, and when to stop.

A row is one label of one input, or the background of an input; see `acnml.head.solve` for φ, the gap
F and the residual. With p = softmax(z) and H = diag(p) - ppᵀ, Newton's step solves (I + HΚ)d = F.
Three ways to choose a step are used:

*Exact* solves this system. Along d the slope of φ is dᵀ(Κ + ΚHΚ)d ≥ 0: φ rises along d. Close to the
optimum convergence is quadratic.

*Diagonal* solves it with Κ replaced by the diagonal of centred variances, at a cost of O(K). Then it
maximises the quadratic model of φ exactly on the plane spanned by this direction and the last step.
That is preconditioned conjugate gradients: locally it converges like them, in one product with Κ per
step, and since the model is exact the sign and the length of a poor direction do not matter.

*Settling* is for rows far from the optimum, where the quadratic model is poor. It solves the nonlinear
problem with the diagonal alone, while the contribution of the rest of Κ to the logits is held fixed:
log p_c + D_c p_c = a_c - L with a = z + D ⊙ (e_y - u). For given L this is Lambert's function,
p_c = W(D_c exp(a_c - L)) / D_c, and the sum of p decreases in L and is convex: Newton's method finds
the L for which it is 1. For a diagonal Κ one such step is the solution.

Whatever the step, it is kept only if φ rises by a share of what its slope promises, and halved
otherwise. The steps of φ are therefore monotone up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.nn import functional

from acnml._algebra.kernels import Kernel, solved_as_if_diagonal

# Rows with a larger residual settle, in this many of their first steps at most.
FAR, SETTLING_STEPS = 0.3, 2

# Newton steps for L, and for Lambert's function within each.
NORMALISER_STEPS, LAMBERT_STEPS = 6, 2

# Two directions count as one if the determinant of their curvatures is this small, relatively.
DEPENDENT = 1e-10

# A step must gain this share of what its slope promises; else it is halved, this often at most.
SHARE_OF_SLOPE, HALVINGS = 0.1, 40

# Smaller variances than this are raised to it where one divides by them.
SMALL_VARIANCE = 1e-8

# Changes of φ below this many units of rounding are not significant.
ROUNDING = 64


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of rows, (N, 1)."""
    return (a * b).sum(-1, keepdim=True)


class Rows(NamedTuple):
    """Problems to solve, sorted by input: labels of inputs, or backgrounds."""

    kernel: Kernel
    inputs: Tensor  # (N,) which of the kernel's inputs
    logits: Tensor  # z₀ (N, K), largest 0
    var: Tensor  # centred variances (N, K)
    labels: Tensor | None  # (N,), None for backgrounds

    def take(self, rows: Tensor | slice) -> Rows:
        """Return some rows."""
        labels = None if self.labels is None else self.labels[rows]
        return Rows(self.kernel, self.inputs[rows], self.logits[rows], self.var[rows], labels)

    def mv(self, u: Tensor) -> Tensor:
        """Return Κu."""
        return self.kernel.mv_rows(u, self.inputs)

    def minus(self, vectors: Tensor) -> Tensor:
        """Return e_y - vectors (for a background: -vectors)."""
        negative = -vectors
        if self.labels is not None:
            negative.scatter_add_(1, self.labels[:, None], torch.ones_like(negative[:, :1]))
        return negative

    def point(self, u: Tensor, shift: Tensor) -> Point:
        """Evaluate the objective at u, where the shift is Κu."""
        z = self.logits + shift
        log_norm = z.logsumexp(-1, keepdim=True)
        own = -log_norm if self.labels is None else z.gather(1, self.labels[:, None]) - log_norm
        return Point(u, shift, z - log_norm, own - dot(u, shift) / 2)


class Point(NamedTuple):
    """Where rows are."""

    u: Tensor  # (N, K)
    shift: Tensor  # Κu (N, K)
    log_p: Tensor  # log softmax(z) (N, K)
    objective: Tensor  # φ(u) (N, 1)

    def where(self, chosen: Tensor, other: Point) -> Point:
        """Return the chosen rows (N, 1) of this and the others of the other."""
        return Point(*(torch.where(chosen, a, b) for a, b in zip(self, other, strict=True)))

    def take(self, rows: Tensor) -> Point:
        """Return some rows."""
        return Point(*(tensor[rows] for tensor in self))


class Step(NamedTuple):
    """A change of u and of the shift Κu, both (N, K)."""

    u: Tensor
    shift: Tensor


class Direction(Protocol):
    """A way to choose steps."""

    def residual(self, rows: Rows, gap: Tensor) -> Tensor:
        """Return the residual of every row (N,), or an estimate of it."""
        ...

    def step(self, rows: Rows, p: Tensor, gap: Tensor, last: Step | None) -> Step:
        """Return the next step, given the one before it."""
        ...


@final
class Exact:
    """Newton's step: a K×K system per row."""

    def residual(self, rows: Rows, gap: Tensor) -> Tensor:
        """Return the residual."""
        return residual(rows, gap)

    def step(self, rows: Rows, p: Tensor, gap: Tensor, last: Step | None) -> Step:
        """Factorise."""
        kernel = rows.kernel.take(rows.inputs).dense()
        system = p.unsqueeze(-1) * (kernel - (p.unsqueeze(1) @ kernel))  # HΚ
        system.diagonal(dim1=-2, dim2=-1).add_(1)
        u = torch.linalg.solve_ex(system, gap)[0]  # a singular system gives a step that is refused
        return Step(u, rows.mv(u))


@final
class Diagonal:
    """The direction for Κ taken as diagonal, improved by the memory of the last step."""

    def residual(self, rows: Rows, gap: Tensor) -> Tensor:
        """Estimate the residual from the centred variances."""
        return dot(rows.var * gap, gap)[:, 0].sqrt()

    def step(self, rows: Rows, p: Tensor, gap: Tensor, last: Step | None) -> Step:
        """Maximise the quadratic model of φ along the direction, or on a plane."""
        u = solved_as_if_diagonal(rows.var, p.unsqueeze(1), gap.unsqueeze(1)).squeeze(1)
        shift = rows.mv(u)
        slope, weighted = dot(gap, shift), p * shift
        mean = weighted.sum(-1, keepdim=True)
        bend = dot(u, shift) + dot(weighted, shift) - mean**2
        if last is None:
            size = slope / bend
            return Step(size * u, size * shift)
        last_slope, last_mean = dot(gap, last.shift), dot(p, last.shift)
        last_bend = dot(last.u, last.shift) + dot(p * last.shift, last.shift) - last_mean**2
        mixed = dot(last.u, shift) + dot(weighted, last.shift) - mean * last_mean
        det = bend * last_bend - mixed**2
        plane = det > DEPENDENT * bend * last_bend
        size = torch.where(plane, (last_bend * slope - mixed * last_slope) / det, slope / bend)
        memory = torch.where(plane, (bend * last_slope - mixed * slope) / det, 0.0)
        return Step(size * u + memory * last.u, size * shift + memory * last.shift)


EXACT, DIAGONAL = Exact(), Diagonal()


def residual(rows: Rows, gap: Tensor) -> Tensor:
    """Return √(FᵀΚF) of every row, (N,)."""
    return dot(gap, rows.mv(gap))[:, 0].clamp(min=0).sqrt()


def ascend(
    rows: Rows, point: Point, direction: Direction, tolerance: float, steps: int
) -> tuple[Point, Tensor]:
    """Improve every row until it is solved, cannot be improved, or has taken all steps.

    Each row is treated for itself: its result does not depend on the other rows. Return the last
    points and their residuals (N,).
    """
    ids = torch.arange(len(point.u), device=point.u.device)
    result = Point(*(torch.empty_like(tensor) for tensor in point))
    residuals, last = torch.empty_like(point.u[:, 0]), None
    stuck = torch.zeros_like(ids, dtype=torch.bool)
    for taken in range(steps + 1):
        p = point.log_p.exp()
        gap = rows.minus(p).sub_(point.u)
        size = dot(point.u, point.shift)[:, 0].clamp(min=1).sqrt()
        estimate = direction.residual(rows, gap)
        finished = stuck | (estimate * size <= tolerance) | (taken == steps)
        if bool(finished.any()):
            some = finished.nonzero()[:, 0]
            exact = residual(rows.take(some), gap[some])
            final = stuck[some] | (exact * size[some] <= tolerance) | (taken == steps)
            finished[some] = final
            where = ids[some[final]]
            residuals[where] = exact[final]
            for whole, part in zip(result, point, strict=True):
                whole[where] = part[finished]
            if bool(finished.all()):
                break
            on = (~finished).nonzero()[:, 0]
            ids, rows, point, p, gap = ids[on], rows.take(on), point.take(on), p[on], gap[on]
            estimate, last = estimate[on], last and Step(last.u[on], last.shift[on])
        last = direction.step(rows, p, gap, last)
        far = (estimate > FAR).nonzero()[:, 0] if taken < SETTLING_STEPS else ids[:0]
        if len(far):
            some = rows.take(far)
            belief = some.minus(point.u[far])
            change = belief - settled(point.log_p[far], belief, some.var)
            last.u[far], last.shift[far] = change, some.mv(change)
        point, stuck = _moved(rows, point, last, dot(gap, last.shift))
    return result, residuals


def _moved(rows: Rows, old: Point, step: Step, slope: Tensor) -> tuple[Point, Tensor]:
    """Take a step, halved where it does not raise φ enough; say which rows cannot be improved."""
    rounding = ROUNDING * torch.finfo(slope.dtype).eps * (1 + old.objective.abs())
    size = torch.ones_like(slope)
    for _ in range(HALVINGS):
        new = rows.point(old.u + size * step.u, old.shift + size * step.shift)
        # Comparisons are written such that they fail for NaN.
        risen = new.objective >= old.objective + SHARE_OF_SLOPE * size * slope - rounding
        if bool(risen.all()):
            return new, torch.zeros_like(risen[:, 0])
        size = torch.where(risen, size, size / 2)
    return new.where(risen, old), ~risen[:, 0]


def settled(log_p: Tensor, belief: Tensor, var: Tensor) -> Tensor:
    """Return the p of the diagonal problem, for rows at log softmax(z) and e_y - u, all (N, K)."""
    var = var.clamp(min=SMALL_VARIANCE)
    log_var, a = var.log(), log_p + var * belief
    # The p of L = a_c - D_c has p_c = 1, that of L = logsumexp(a) - max D no sum below 1: the right L
    # is not to the left of them.
    leftmost = a.logsumexp(-1, keepdim=True) - var.amax(-1, keepdim=True)
    leftmost = torch.maximum(leftmost, (a - var).amax(-1, keepdim=True))
    L = leftmost.clamp(min=0)  # log_p is normalised: 0 is where L is now
    for _ in range(NORMALISER_STEPS):
        x = (a - L + log_var).clamp(min=-600)
        v = functional.softplus(x)
        w = v * (1 - v.log1p() / (2 + v))  # Iacono & Boyd (2017)
        for _ in range(LAMBERT_STEPS):
            w = w * (1 + x - w.log()) / (1 + w)
        p = w / var
        total = p.sum(-1, keepdim=True)
        L = torch.maximum(L + (total - 1) / (p / (1 + w)).sum(-1, keepdim=True), leftmost)
    return p / total


def centred_variances(kernel: Kernel) -> Tensor:
    """Return the diagonals (B, K) of Κ - a1ᵀ - 1aᵀ whose other entries sum to zero in each row.

    With R_i = Σ_j≠i Κ_ij these are the a with (K-2) a_i + Σ_j a_j = R_i. The result is not negative.
    """
    var = kernel.diagonal()
    classes = var.shape[1]
    off = kernel.mv(torch.ones_like(var).unsqueeze(1)).squeeze(1) - var
    if classes == 2:
        return (var - off).clamp(min=0)
    a = (off - off.sum(-1, keepdim=True) / (2 * classes - 2)) / (classes - 2)
    return (var - 2 * a).clamp(min=0)
