"""Solve a `Problem`: for every label of every input, in logit space.

The problem. For logits z₀ and their covariance V (the weight α is part of V), find for each label y

    u = e_y - softmax(z),    z = z₀ + Vu,    log_lik_y = log softmax(z)_y.

This u maximises the concave function φ(u) = log softmax(z₀ + Vu)_y - ½ uᵀVu, whose gradient is VF
with the *gap* F = e_y - softmax(z) - u.

Accuracy. The residual is √(FᵀVF). In the norm ‖u‖² = uᵀVu, φ is strongly concave with modulus 1,
so the distance to the optimum is at most the residual. The gradient of log_lik is
V(e_y - softmax(z)), whose dual norm is ‖u + F‖ ≤ ‖u‖ + residual. A label is solved when
residual · max(1, ‖u‖) is at most the tolerance: log_lik is then off by no more than the tolerance,
up to second order.

Only differences of logits matter: u sums to zero and softmax ignores constants. So V may be
replaced by V - a1ᵀ - 1aᵀ for any vector a. `centred_variances` takes the a for which the entries
off the diagonal sum to zero in each row, and returns the new diagonal D. It describes V much better
than the variances do, for example when all logits share a large common variance.

The first step goes to the solution for the diagonal D alone: log p_c + D_c p_c = a_c - L with
a = z₀ + D ⊙ e_y. For given L it is Lambert's function, p_c = W(D_c exp(a_c - L)) / D_c. The sum of
p is convex and decreasing in L, and Newton's method finds the L for which it is 1. For a diagonal V
this is the answer, and elsewhere it is a start at which quadratic models of φ are good.

Newton's step solves (I + HV)d = F, where p = softmax(z) and H = diag(p) - ppᵀ. Along d the slope of
φ is dᵀ(V + VHV)d ≥ 0: φ rises along d. Close to the optimum convergence is quadratic. With many
classes, steps of *conjugate gradients* come before: they solve the system with D in place of V, at
a cost of O(K), and maximise the quadratic model of φ exactly on the plane spanned by this direction
and the last step. That takes one product with V. Newton's steps are for labels that this leaves.

Whatever the step, it is kept only if φ rises by a share of what its slope promises, up to rounding,
and halved otherwise. No label ends below the φ of the mean, where u = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from acnml._util.torch_state import one_thread
from acnml.solve.lambert import lambert

# Up to this many classes, solving the K×K systems of all labels is cheapest.
FEW_CLASSES = 16

# Steps of conjugate gradients at most, before the remaining labels take Newton's.
CONJUGATE_STEPS = 40

# Numbers in a tensor of labels that are solved together: it should stay in the processor's cache.
BLOCK = 2**16

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


class LogitSolution(NamedTuple):
    """L labels of B inputs; NaN for inputs whose logits or covariances are not finite."""

    u: Tensor  # (B, L, K)
    log_lik: Tensor  # (B, L)
    residual: Tensor  # (B, L)


@one_thread()
def solve(
    logits: Tensor,
    V: Tensor,
    labels: Tensor | None = None,
    tolerance: float = 1e-9,
    steps: int = 50,
) -> LogitSolution:
    """Solve for labels of every input. The answer for an input does not depend on the others.

    Args:
        logits: z₀ (B, K), in double precision.
        V: (B, K, K), α included.
        labels: which labels (L,), the same of every input; all of them by default.
        tolerance: of log_lik, and of the residual.
        steps: Newton's steps, at most.
    """
    classes = logits.shape[1]
    labels = torch.arange(classes, device=logits.device) if labels is None else labels
    finite = (logits.sum(1) + V.sum((1, 2))).isfinite()
    logits = (logits - logits.amax(1, keepdim=True)).where(finite[:, None], torch.nan)
    var, eye = centred_variances(V), torch.eye(classes, dtype=V.dtype, device=V.device)
    at_once, inputs = max(1, BLOCK // classes), []
    for i in torch.arange(len(V), device=V.device).split(max(1, at_once // len(labels))):
        parts = []
        for targets in eye[labels].split(at_once):
            rows = _Rows(logits[i, None], V[i], var[i, None], targets.expand(len(i), -1, -1))
            parts.append(_solved(rows, tolerance, steps))
        inputs.append([torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)])
    u, log_lik, residual = (torch.cat(tensors) for tensors in zip(*inputs, strict=True))
    at_mean = torch.log_softmax(logits, -1)[:, labels]
    return LogitSolution(u, torch.maximum(log_lik, at_mean), residual)


def centred_variances(V: Tensor) -> Tensor:
    """Return the diagonals (B, K) of V - a1ᵀ - 1aᵀ whose other entries sum to zero in each row.

    With R_i = Σ_j≠i V_ij these are the a with (K-2) a_i + Σ_j a_j = R_i. Negative values become 0.
    """
    var, classes = V.diagonal(dim1=-2, dim2=-1), V.shape[-1]
    off = V.sum(-1) - var
    if classes == 2:
        return (var - off).clamp(min=0)
    a = (off - off.sum(-1, keepdim=True) / (2 * classes - 2)) / (classes - 2)
    return (var - 2 * a).clamp(min=0)


class _Rows(NamedTuple):
    """Labels of inputs to solve for."""

    logits: Tensor  # z₀ (B, 1, K), largest 0
    V: Tensor  # (B, K, K)
    var: Tensor  # centred variances (B, 1, K)
    targets: Tensor  # e_y (B, L, K)

    def take(self, inputs: Tensor) -> _Rows:
        """Return some inputs."""
        return _Rows(*(tensor[inputs] for tensor in self))

    def apart(self, i: Tensor, y: Tensor) -> _Rows:
        """Return some labels (N,) of some inputs (N,), as inputs with one label each."""
        return _Rows(self.logits[i], self.V[i], self.var[i], self.targets[i, y].unsqueeze(1))

    def residual(self, gap: Tensor) -> Tensor:
        """Return √(FᵀVF), (B, L, 1), with what rounding may hide where V is nearly singular."""
        hidden = 4 * torch.finfo(gap.dtype).eps * _dot(self.var * gap, gap)
        return (_dot(gap, gap @ self.V).clamp(min=0) + hidden).sqrt()


class _Point(NamedTuple):
    """Where rows are."""

    u: Tensor  # (..., K)
    shift: Tensor  # Vu (..., K)
    p: Tensor  # softmax(z) (..., K)
    objective: Tensor  # φ(u) (..., 1)
    energy: Tensor  # uᵀVu (..., 1)

    @staticmethod
    def at(logits: Tensor, targets: Tensor, u: Tensor, shift: Tensor) -> _Point:
        """Evaluate φ at u, where the shift is Vu."""
        z = logits + shift
        z -= z.amax(-1, keepdim=True)
        own, p = _dot(z, targets), z.exp_()
        total, energy = p.sum(-1, keepdim=True), _dot(u, shift)
        return _Point(u, shift, p.div_(total), own - total.log() - energy / 2, energy)

    def take(self, *index: Tensor) -> _Point:
        """Return some inputs, or some labels of some inputs."""
        return _Point(*(tensor[index] for tensor in self))

    def put(self, *index: Tensor, other: _Point) -> None:
        """Overwrite what `take` returns."""
        for tensor, new in zip(self, other, strict=True):
            tensor[index] = new

    def is_solved(self, residual: Tensor, tolerance: float) -> Tensor:
        """Whether log_lik is accurate, (..., 1)."""
        return residual * self.energy.clamp(min=1).sqrt() <= tolerance


class _Step(NamedTuple):
    """A change of u and of the shift Vu."""

    u: Tensor
    shift: Tensor

    def take(self, *index: Tensor) -> _Step:
        """Return some inputs, or some labels of some inputs."""
        return _Step(self.u[index], self.shift[index])


# Rows, p, the gap F and the last step -> the next one.
_Method: TypeAlias = Callable[[_Rows, Tensor, Tensor, "_Step | None"], _Step]


def _solved(rows: _Rows, tolerance: float, steps: int) -> LogitSolution:
    """Solve for all labels of a block."""
    nothing = torch.zeros_like(rows.targets)
    mean = _Point.at(rows.logits, rows.targets, nothing, nothing)
    u = rows.targets - _of_diagonal(rows.logits, rows.var, rows.targets)
    first = _Step(u, u @ rows.V)
    point, _ = _moved(rows, mean, first, _dot(rows.targets - mean.p, first.shift))
    classes = nothing.shape[2]
    if classes <= FEW_CLASSES:
        point, residual = _ascend(rows, point, _newton, tolerance, steps)
    else:
        point, residual = _ascend(rows, point, _conjugate, tolerance, CONJUGATE_STEPS)
        left = (~point.is_solved(residual, tolerance))[..., 0].nonzero()
        for some in left.split(max(1, 8 * BLOCK // classes**2)) if len(left) else ():
            i, y = some.unbind(1)
            alone = point.take(i[:, None], y[:, None])
            better, residual[i, y, None] = _ascend(
                rows.apart(i, y), alone, _newton, tolerance, steps
            )
            point.put(i[:, None], y[:, None], other=better)
    log_lik = point.objective + point.energy / 2
    return LogitSolution(point.u, log_lik[..., 0], residual[..., 0])


def _ascend(
    rows: _Rows, point: _Point, method: _Method, tolerance: float, steps: int
) -> tuple[_Point, Tensor]:
    """Take steps until every label of an input is solved or cannot be improved.

    Return where the rows end, and their residuals (B, L, 1). Inputs that are finished are put
    aside, so that an answer does not depend on the other inputs.
    """
    ids, done = torch.arange(len(point.u), device=point.u.device), []
    before = torch.full_like(point.energy, torch.inf)
    risen, last = torch.ones_like(before, dtype=torch.bool), None
    for taken in range(steps + 1):
        gap = rows.targets - point.p - point.u
        residual = rows.residual(gap)
        hopeful = ~point.is_solved(residual, tolerance) & (risen | (residual < before / 2))
        going = hopeful.flatten(1).any(1) & (taken < steps)
        if not bool(going.all()) or not len(ids):
            done.append((ids[~going], point.take(~going), residual[~going]))
            if not bool(going.any()):
                break
            ids, rows, point = ids[going], rows.take(going), point.take(going)
            gap, residual = gap[going], residual[going]
            last = None if last is None else last.take(going)
        before, last = residual, method(rows, point.p, gap, last)
        point, risen = _moved(rows, point, last, _dot(gap, last.shift))
    all_ids, points, residuals = zip(*done, strict=True)
    order = torch.cat(all_ids).argsort()
    ends = _Point(*(torch.cat(tensors) for tensors in zip(*points, strict=True)))
    return ends.take(order), torch.cat(residuals)[order]


def _newton(rows: _Rows, p: Tensor, gap: Tensor, last: _Step | None) -> _Step:
    """Solve (I + HV)d = F."""
    system = p.unsqueeze(-1) * (rows.V.unsqueeze(1) - (p @ rows.V).unsqueeze(-2))  # HV
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    u = torch.linalg.solve_ex(system, gap)[0]  # a singular system gives a step that is refused
    return _Step(u, u @ rows.V)


def _conjugate(rows: _Rows, p: Tensor, gap: Tensor, last: _Step | None) -> _Step:
    """Maximise the quadratic model of φ along the direction of D, or on the plane."""

    def bend(one: _Step, other: _Step) -> Tensor:
        """Return dᵀ(V + VHV)d' for two steps d and d'."""
        mean = _dot(p, one.shift) * _dot(p, other.shift)
        return _dot(one.u, other.shift) + _dot(p * one.shift, other.shift) - mean

    u = _diagonal_newton(rows.var, p, gap)
    new = _Step(u, u @ rows.V)
    slope, own = _dot(gap, new.shift), bend(new, new)
    if last is None:
        size = slope / own
        return _Step(size * new.u, size * new.shift)
    last_slope, its, mixed = _dot(gap, last.shift), bend(last, last), bend(last, new)
    det = own * its - mixed**2
    plane = det > DEPENDENT * own * its
    size = torch.where(plane, (its * slope - mixed * last_slope) / det, slope / own)
    memory = torch.where(plane, (own * last_slope - mixed * slope) / det, 0.0)
    return _Step(size * new.u + memory * last.u, size * new.shift + memory * last.shift)


def _diagonal_newton(var: Tensor, p: Tensor, gap: Tensor) -> Tensor:
    """Solve (I + HD)d = F by the formula of Sherman and Morrison.

    I + HD = R⁻¹ - p(p ⊙ D)ᵀ with R = (I + diag(p ⊙ D))⁻¹. The formula's denominator is Σ_c p_c R_c,
    which loses no digits.
    """
    weights = p * var
    ratio = (weights + 1).reciprocal_()
    column, solved = p * ratio, ratio.mul_(gap)
    factor = _dot(weights, solved) / column.sum(-1, keepdim=True)
    return solved.addcmul_(factor, column)


def _moved(rows: _Rows, old: _Point, step: _Step, slope: Tensor) -> tuple[_Point, Tensor]:
    """Take a step, halved where it does not raise φ enough; say where φ rose significantly."""
    new = _Point.at(rows.logits, rows.targets, old.u + step.u, old.shift + step.shift)
    # Of the terms that φ is made of, before or after the step: one that removes a component of u in
    # the null space of V makes them smaller, and must not be refused for the rounding of the old φ.
    terms = torch.maximum(_dot(rows.var * new.u, new.u), _dot(rows.var * old.u, old.u))
    rounding = ROUNDING * torch.finfo(slope.dtype).eps * (1 + old.objective.abs() + terms)
    enough = new.objective >= old.objective + SHARE_OF_SLOPE * slope - rounding
    i, y = (~enough)[..., 0].nonzero(as_tuple=True)  # NaN is not enough, too
    if len(i):
        given = rows.logits[i, 0], rows.targets[i, y]
        halved = _halved(*given, old.take(i, y), step.take(i, y), slope[i, y])
        new.put(i, y, other=halved)
    return new, new.objective > old.objective + rounding


def _halved(logits: Tensor, targets: Tensor, old: _Point, step: _Step, slope: Tensor) -> _Point:
    """Halve steps until they raise φ enough; rows for which none does stay where they are."""
    size, best = torch.ones_like(slope), old
    short = torch.ones_like(slope, dtype=torch.bool)
    for _ in range(HALVINGS):
        size = size / 2
        new = _Point.at(logits, targets, old.u + size * step.u, old.shift + size * step.shift)
        good = short & (new.objective >= old.objective + SHARE_OF_SLOPE * size * slope)
        best = _Point(*(torch.where(good, a, b) for a, b in zip(new, best, strict=True)))
        short = short & ~good
        if not bool(short.any()):
            break
    return best


def _of_diagonal(z: Tensor, var: Tensor, targets: Tensor) -> Tensor:
    """Return the p that solve the problems of D alone."""
    var = var.clamp(min=SMALL_VARIANCE)
    log_var, a = var.log(), z + var * targets
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


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of vectors (..., K), as (..., 1)."""
    return (a * b).sum(-1, keepdim=True)
