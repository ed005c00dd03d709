"""Raising φ for many rows at once: directions, step sizes, and when to stop.

A row is one label of one input; see `acnml.solve.logits` for φ, the gap F and the residual. With
p = softmax(z) and H = diag(p) - ppᵀ, Newton's step solves (I + HV)d = F. There are three ways to
choose a step:

*Diagonal* solves this system with V replaced by the diagonal of centred variances, at a cost of
O(K). Then it maximises the quadratic model of φ exactly on the plane spanned by this direction and
the last step. These are preconditioned conjugate gradients: one product with V per step, and since
the model is exact, neither the sign nor the length of a poor direction matters.

*Settling* is the first step of rows far from the optimum, where the quadratic model is poor. It
solves the nonlinear problem with the diagonal D alone, while the contribution of the rest of V to
the logits is held fixed: log p_c + D_c p_c = a_c - L with a = z + D ⊙ (e_y - u). For given L it is
Lambert's function, p_c = W(D_c exp(a_c - L)) / D_c. The sum of p is convex and decreasing in L, and
Newton's method finds the L for which it is 1. For a diagonal V one such step is the solution.

*Exact* solves the system with V itself, for the rows that the others leave unsolved. Along d the
slope of φ is dᵀ(V + VHV)d ≥ 0: φ rises along d. Close to the optimum convergence is quadratic.

Whatever the step, it is kept only if φ rises by a share of what its slope promises, up to rounding,
and halved otherwise. A row never ends below the φ at which it started.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml._algebra.kernels import Kernel, diagonal_newton, dot, lambert

# Rows with a larger residual settle, in this many of their first steps at most.
FAR, SETTLING_STEPS = 0.3, 1

# Newton steps for L.
NORMALISER_STEPS = 5

# Smaller variances are raised to this where one divides by them.
SMALL_VARIANCE = 1e-8

# Two directions count as one if the determinant of their curvatures is this small, relatively.
DEPENDENT = 1e-10

# A step must gain this share of what its slope promises; else it is halved, this often at most.
SHARE_OF_SLOPE, HALVINGS = 0.1, 40

# Changes of φ below this many units of rounding are not significant.
ROUNDING = 64

# Finished rows are dropped once less than this share remains.
WORTH_KEEPING = 0.75


class Rows(NamedTuple):
    """Problems to solve, one for each label of an input, sorted by input."""

    kernel: Kernel
    inputs: Tensor  # (N,) which of the kernel's inputs
    logits: Tensor  # z₀ (N, K), largest 0
    var: Tensor  # centred variances (N, K)
    labels: Tensor  # (N, 1)

    def take(self, rows: Tensor) -> Rows:
        """Return some rows."""
        return Rows(self.kernel, *(tensor[rows] for tensor in self[1:]))

    def mv(self, u: Tensor) -> Tensor:
        """Return Vu."""
        return self.kernel.mv_rows(u, self.inputs)

    def minus(self, vectors: Tensor) -> Tensor:
        """Return e_y - vectors."""
        ones = torch.ones_like(self.labels, dtype=vectors.dtype)
        return vectors.neg().scatter_add_(1, self.labels, ones)

    def point(self, u: Tensor, shift: Tensor) -> Point:
        """Evaluate φ at u, where the shift is Vu."""
        z = self.logits + shift
        largest = z.amax(-1, keepdim=True)
        own = z.gather(1, self.labels) - largest
        p = z.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        energy = dot(u, shift)
        return Point(u, shift, p.div_(total), own - total.log() - energy / 2, energy)

    def residual(self, gap: Tensor) -> Tensor:
        """Return √(FᵀVF), (N,), with what rounding may hide where V is nearly singular along F."""
        hidden = 4 * torch.finfo(gap.dtype).eps * dot(self.var * gap, gap)
        return (dot(gap, self.mv(gap)).clamp(min=0) + hidden).sqrt()[:, 0]


class Point(NamedTuple):
    """Where rows are."""

    u: Tensor  # (N, K)
    shift: Tensor  # Vu (N, K)
    p: Tensor  # softmax(z) (N, K)
    objective: Tensor  # φ(u) (N, 1)
    energy: Tensor  # uᵀVu (N, 1)

    @property
    def log_lik(self) -> Tensor:
        """log softmax(z)_y of every row, (N,)."""
        return (self.objective + self.energy / 2)[:, 0]

    def take(self, rows: Tensor) -> Point:
        """Return some rows."""
        return Point(*(tensor[rows] for tensor in self))

    def put(self, rows: Tensor, other: Point) -> None:
        """Overwrite some rows with those of another point."""
        for tensor, new in zip(self, other, strict=True):
            tensor[rows] = new

    def where(self, chosen: Tensor, other: Point) -> Point:
        """Return the chosen rows (N, 1) of this and the others of the other."""
        return Point(*(torch.where(chosen, a, b) for a, b in zip(self, other, strict=True)))


class Step(NamedTuple):
    """A change of u and of the shift Vu, both (N, K)."""

    u: Tensor
    shift: Tensor

    def take(self, rows: Tensor) -> Step:
        """Return some rows."""
        return Step(self.u[rows], self.shift[rows])


def _exact_step(rows: Rows, p: Tensor, gap: Tensor, last: Step | None) -> Step:
    """Solve (I + HV)d = F."""
    kernel = rows.kernel.take(rows.inputs).dense()
    system = p.unsqueeze(-1) * (kernel - (p.unsqueeze(1) @ kernel))  # HV
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    u = torch.linalg.solve_ex(system, gap)[0]  # a singular system gives a step that is refused
    return Step(u, (u.unsqueeze(1) @ kernel).squeeze(1))


def _diagonal_step(rows: Rows, p: Tensor, gap: Tensor, last: Step | None) -> Step:
    """Maximise the quadratic model of φ along the direction, or on the plane."""
    u = diagonal_newton(rows.var, p, gap)
    shift = rows.mv(u)
    slope, weighted = dot(gap, shift), p * shift
    mean = weighted.sum(-1, keepdim=True)
    bend = dot(u, shift) + dot(weighted, shift) - mean**2
    if last is None:
        size = slope / bend
        return Step(u.mul_(size), shift.mul_(size))
    last_slope, last_weighted = dot(gap, last.shift), p * last.shift
    last_mean = last_weighted.sum(-1, keepdim=True)
    last_bend = dot(last.u, last.shift) + dot(last_weighted, last.shift) - last_mean**2
    mixed = dot(last.u, shift) + dot(last_weighted, shift) - mean * last_mean
    det = bend * last_bend - mixed**2
    plane = det > DEPENDENT * bend * last_bend
    size = torch.where(plane, (last_bend * slope - mixed * last_slope) / det, slope / bend)
    memory = torch.where(plane, (bend * last_slope - mixed * slope) / det, 0.0)
    return Step(
        u.mul_(size).addcmul_(memory, last.u), shift.mul_(size).addcmul_(memory, last.shift)
    )


def ascend(
    rows: Rows, point: Point, exact: bool, tolerance: float, steps: int
) -> tuple[Point, Tensor]:
    """Improve every row until it is solved, cannot be improved, or has taken all steps.

    Each row is treated for itself: its result does not depend on the other rows. The result is
    noted when the row is finished; finished rows are dropped when they are many.

    Args:
        rows: what to solve.
        point: where the rows begin.
        exact: whether directions are those of *Exact*, else those of *Diagonal*, for which the
            centred variances also give a rough residual. It is confirmed before a row is finished.
        tolerance: of residuals.
        steps: at most.

    Returns:
        Where the rows end, and their residuals (N,).
    """
    ids = torch.arange(len(point.u), device=point.u.device)
    result = Point(*(torch.empty_like(tensor) for tensor in point))
    residuals, before = torch.empty_like(point.u[:, 0]), torch.full_like(point.u[:, 0], torch.inf)
    unfinished = risen = torch.ones_like(ids, dtype=torch.bool)
    last: Step | None = None
    for taken in range(steps + 1):
        gap = rows.minus(point.p + point.u)
        size = point.energy[:, 0].clamp(min=1).sqrt()
        estimate = rows.residual(gap) if exact else dot(rows.var * gap, gap)[:, 0].sqrt()
        given_up = ~(risen | (estimate < before / 2)) if taken < steps else unfinished
        some = (unfinished & (given_up | ~(estimate * size > tolerance))).nonzero()[:, 0]
        if len(some):
            residual = estimate[some] if exact else rows.take(some).residual(gap[some])
            final = given_up[some] | (residual * size[some] <= tolerance)
            some, residual = some[final], residual[final]
            if len(some) == len(result.u):
                return point, residual
            result.put(ids[some], point.take(some))
            residuals[ids[some]] = residual
            unfinished = unfinished.index_fill(0, some, False)
            rest = unfinished.nonzero()[:, 0]
            if not len(rest):
                break
            if len(rest) < WORTH_KEEPING * len(ids):
                rows, point, gap = rows.take(rest), point.take(rest), gap[rest]
                ids, unfinished, estimate = ids[rest], unfinished[rest], estimate[rest]
                last = None if last is None else last.take(rest)
        step = _exact_step if exact else _diagonal_step
        before, last = estimate, step(rows, point.p, gap, last)
        if taken < SETTLING_STEPS:
            _settle(rows, point, last, (estimate > FAR).nonzero()[:, 0])
        point, risen = _moved(rows, point, last, dot(gap, last.shift))
        if taken < SETTLING_STEPS:
            risen |= estimate > FAR  # other steps may help where settling did not
    return result, residuals


def _moved(rows: Rows, old: Point, step: Step, slope: Tensor) -> tuple[Point, Tensor]:
    """Take a step, halved where it does not raise φ enough; say where φ rose significantly (N,)."""
    new = rows.point(old.u + step.u, old.shift + step.shift)
    # Of the terms that φ is made of, before or after the step: one that removes a component of u in
    # the null space of V makes them smaller, and must not be refused for the rounding of the old φ.
    terms = torch.maximum(dot(rows.var * new.u, new.u), dot(rows.var * old.u, old.u))
    size = 1 + old.objective.abs() + terms
    rounding = ROUNDING * torch.finfo(slope.dtype).eps * size
    least = old.objective + SHARE_OF_SLOPE * slope - rounding
    failed = (~(new.objective >= least))[:, 0].nonzero()[:, 0]  # NaN has failed, too
    if len(failed):
        some = rows.take(failed), old.take(failed), step.take(failed), slope[failed]
        new.put(failed, _halved(*some))
    return new, (new.objective > old.objective + rounding)[:, 0]


def _halved(rows: Rows, old: Point, step: Step, slope: Tensor) -> Point:
    """Halve steps until they raise φ enough; rows for which none does stay where they are."""
    size, best = torch.full_like(slope, 0.5), old
    short = torch.ones_like(slope, dtype=torch.bool)
    for _ in range(HALVINGS):
        u, shift = (torch.addcmul(a, size, b) for a, b in zip(old[:2], step, strict=True))
        new = rows.point(u, shift)
        good = short & (new.objective >= old.objective + SHARE_OF_SLOPE * size * slope)
        best, short = new.where(good, best), short & ~good
        if not bool(short.any()):
            break
        size = size / 2
    return best


def _settle(rows: Rows, point: Point, step: Step, far: Tensor) -> None:
    """Replace the steps of rows far from the optimum."""
    if len(far):
        some = rows.take(far)
        belief = some.minus(point.u[far])  # e_y - u
        step.u[far] = belief - settled(some.logits + point.shift[far], belief, some.var)
        step.shift[far] = some.mv(step.u[far])


def settled(z: Tensor, belief: Tensor, var: Tensor) -> Tensor:
    """Return the p of the diagonal problem, for rows at logits z and e_y - u, all (N, K)."""
    var = var.clamp(min=SMALL_VARIANCE)
    log_var, a = var.log(), z + var * belief
    # At L = a_c - D_c, p_c is 1; at L = logsumexp(a) - max D, the sum is at least 1. So the right L
    # is not to the left of them.
    leftmost = a.logsumexp(-1, keepdim=True) - var.amax(-1, keepdim=True)
    leftmost = torch.maximum(leftmost, (a - var).amax(-1, keepdim=True))
    L = torch.maximum(leftmost, z.logsumexp(-1, keepdim=True))
    for _ in range(NORMALISER_STEPS):
        w = lambert(a - L + log_var)
        p = w / var
        total = p.sum(-1, keepdim=True)
        L = torch.maximum(L + (total - 1) / (p / (1 + w)).sum(-1, keepdim=True), leftmost)
    return (p / total).clamp(min=torch.finfo(z.dtype).tiny)
