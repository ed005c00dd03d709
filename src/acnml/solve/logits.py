"""Solve a `Problem`: for every label of every input, in logit space.

The problem. For logits z₀ and their covariance V (the weight α is part of V), find for each label y

    u = e_y - softmax(z),    z = z₀ + Vu,    log_lik_y = log softmax(z)_y.

This u maximises the concave function φ(u) = log softmax(z₀ + Vu)_y - ½ uᵀVu, whose gradient is VF
with the gap F = e_y - softmax(z) - u. The *background* p̄ describes an input without a label: u = -p̄
solves the same problem with e_y replaced by 0 and log softmax(z)_y by -logsumexp(z). It is only
used, roughly, for starting points.

Accuracy. The residual is √(FᵀVF). In the norm ‖u‖² = uᵀVu, φ is strongly concave with modulus 1,
so the distance to the optimum is at most the residual. The gradient of log_lik is
V(e_y - softmax(z)), whose dual norm is ‖u + F‖ ≤ ‖u‖ + residual. A row is solved when
residual · max(1, ‖u‖) is at most the tolerance: log_lik is then off by no more than the tolerance,
up to second order.

Only differences of logits matter: u sums to zero and softmax ignores constants. So V may be
replaced by V - a1ᵀ - 1aᵀ for any vector a. `centred_variances` takes the a for which the entries
off the diagonal sum to zero in each row, and returns the new diagonal. It describes V much better
than the variances do, for example when all logits share a large common variance.

Starting point and bound. Let q be any distribution and q' the same without class y. For any t,
Gibbs' inequality logsumexp(z) ≥ pᵀz + S(p), with the entropy S and p = (1-t)e_y + tq', and the
maximum over u give

    φ(u) ≤ φ₊ = tℓ + ½t²κ + t log t + (1-t) log(1-t),
    ℓ = z₀_y - q'ᵀz₀ - S(q'),    κ = (e_y - q')ᵀV(e_y - q').

The best t solves t = sigmoid(-(ℓ + tκ)), and u = t(e_y - q') with q = p̄ is a good starting point.
Strong concavity also gives ½‖u‖² ≤ φ(u) - φ(0) at the optimum, where φ(0) is the log-probability at
the mean. Since log_lik = φ(u) + ½‖u‖², it follows that

    φ(0) ≤ log_lik ≤ 2φ₊ - φ(0).

With many classes, labels are left at the mean if these gains, summed over them, are negligible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.kernels import Kernel, centred_variances, dot, gap_variances
from acnml._util.torch_state import one_thread
from acnml.solve.newton import ROUNDING, Point, Rows, ascend, settled

# Up to this many classes every label is solved for.
FEW_CLASSES = 64

# Scalar steps for the share t of a starting point.
SHARE_STEPS = 8

# Steps with the diagonal approximation, before the remaining rows take exact Newton steps.
CHEAP_STEPS = 40

# Numbers in one block of rows: its tensors should stay in the processor's cache.
BLOCK = 2**16

# `omitted` of a label left out is at least this: 0 means that it was solved for.
LEAST = 1e-30


class Precision(NamedTuple):
    """How accurately to solve."""

    tolerance: float = 1e-9  # of log_lik, and of the residual
    steps: int = 50  # exact Newton steps at most
    negligible: float = 1e-3  # sum of the gains of labels that are left at the mean


DEFAULT = Precision()


class LogitSolution(NamedTuple):
    """All labels of a batch of inputs."""

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K)
    omitted: Tensor  # (B, K) bound on the gain of a label left at the mean, 0 for a solved one


@one_thread()
def solve(
    logits: Tensor, kernel: Kernel, precision: Precision = DEFAULT, at_once: int | None = None
) -> LogitSolution:
    """Solve for all labels that matter; the others keep their log-likelihood at the mean.

    Args:
        logits: z₀ (B, K), in double precision.
        kernel: V of the B inputs, α included.
        precision: how accurately to solve.
        at_once: rows (labels of inputs) in memory at once, at most.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    at_mean = torch.log_softmax(logits, -1)
    var = centred_variances(kernel)
    finite = (logits + var).isfinite().all(-1)
    if not bool(finite.all()):
        return _only(finite, logits, kernel, precision, at_once)
    start = Start.of(logits, kernel, background(logits, at_mean, kernel, var))
    omitted, log_lik = torch.zeros_like(at_mean), at_mean.clone()
    if logits.shape[1] > FEW_CLASSES:
        omitted = _left_out(start.upper_bound(at_mean).exp() - at_mean.exp(), precision.negligible)
    residual = start.residual_at_mean(at_mean.exp(), kernel)
    size = max(1, BLOCK // logits.shape[1])
    for block in _blocks((omitted == 0).nonzero(), min(at_once or size, size)):
        i, y = block.unbind(1)
        rows = Rows(kernel, i, logits[i], var[i], y[:, None])
        point, residual[i, y] = _solved(rows, start.point(rows), precision)
        log_lik[i, y] = point.log_lik
    return LogitSolution(torch.maximum(log_lik, at_mean), residual, omitted)


def coefficients(
    logits: Tensor, kernel: Kernel, labels: Tensor, precision: Precision = DEFAULT
) -> Tensor:
    """Return u (B, L, K) of some labels (L,), the same of every input; arguments as in `solve`."""
    logits, var = logits - logits.amax(-1, keepdim=True), centred_variances(kernel)
    at_mean = torch.log_softmax(logits, -1)
    start = Start.of(logits, kernel, background(logits, at_mean, kernel, var))
    i = torch.arange(len(logits), device=logits.device).repeat_interleave(len(labels))
    rows = Rows(kernel, i, logits[i], var[i], labels.repeat(len(logits))[:, None])
    point, _ = _solved(rows, start.point(rows), precision)
    return point.u.unflatten(0, (len(logits), -1))


def _only(
    chosen: Tensor, logits: Tensor, kernel: Kernel, precision: Precision, at_once: int | None
) -> LogitSolution:
    """Solve for the chosen inputs (B,). The others become NaN, which no comparison can pass."""
    rows = chosen.nonzero()[:, 0]
    unknown = torch.full_like(logits, torch.nan)
    found = LogitSolution(unknown, unknown.clone(), torch.zeros_like(logits))
    if len(rows):
        part = solve(logits[rows], kernel.take(rows), precision, at_once)
        for tensor, new in zip(found, part, strict=True):
            tensor[rows] = new
    return found


def background(logits: Tensor, log_probs: Tensor, kernel: Kernel, var: Tensor) -> Tensor:
    """Return log p̄ of every input (B, K), roughly: one settling step from the mean."""
    p = log_probs.exp()
    return settled(logits - kernel.mv(p.unsqueeze(1)).squeeze(1), p, var).log()


def _solved(rows: Rows, start: Point, precision: Precision) -> tuple[Point, Tensor]:
    """Return the solutions of rows and their residuals (N,)."""
    tolerance, classes = precision.tolerance, rows.logits.shape[1]
    cheap = min(CHEAP_STEPS, 2 * precision.steps)
    point, residual = ascend(rows, start, False, tolerance, cheap)
    # What rounding leaves: logits are off by a few units, and the gap in proportion.
    off = ROUNDING * torch.finfo(residual.dtype).eps * (1 + point.shift.abs().amax(-1))
    reachable = off * rows.var.amax(-1).sqrt()
    unsolved = (~(residual <= reachable.clamp(min=tolerance))).nonzero()[:, 0]
    size = max(1, 8 * BLOCK // classes**2)
    for rest in _blocks(unsolved, size):
        better, left = ascend(rows.take(rest), point.take(rest), True, tolerance, precision.steps)
        point.put(rest, better)
        residual[rest] = left
    return point, residual


@final
@dataclass(frozen=True, eq=False)
class Start:
    """What all labels of an input share: see the top of this file."""

    q: Tensor  # (B, 2, K): q, and q without its likeliest class
    moved: Tensor  # Vq of both (B, 2, K)
    top: Tensor  # the likeliest class of q (B, 1)
    lead: Tensor  # ℓ (B, K)
    spread: Tensor  # κ (B, K)
    share: Tensor  # t (B, K)
    factor: Tensor  # u = factor · (e_y - q), with the second q for the likeliest class (B, K)

    @staticmethod
    def of(logits: Tensor, kernel: Kernel, log_q: Tensor) -> Start:
        """Look at inputs with some q for each."""
        full, var = log_q.exp(), kernel.diagonal()
        # q' of the likeliest class is stored, as its 1 - q_y must not be a difference.
        top = full.argmax(-1, keepdim=True)
        rest = full.scatter(1, top, 0.0)
        mass = rest.sum(-1, keepdim=True).clamp(min=torch.finfo(full.dtype).tiny)
        q = torch.stack([full, rest / mass], dim=1)
        moved = kernel.mv(q)
        spread = var.unsqueeze(1) - 2 * moved + dot(q, moved)  # with e_y - q instead of e_y - q'
        others = (1 - full).scatter(1, top, mass)
        surprise = logits - log_q
        surprise = surprise - surprise.gather(1, top)
        lead = log_q - others.log() - (dot(full, surprise) - surprise) / others
        others = others.scatter(1, top, 1.0)
        spread = (spread[:, 0] / others**2).scatter(1, top, spread[:, 1].gather(1, top))
        spread = spread.clamp(min=0)
        share = _share(lead, spread)
        return Start(q, moved, top, lead, spread, share, share / others)

    def point(self, rows: Rows) -> Point:
        """Return u = t(e_y - q') of rows or, where φ is larger there, u = 0."""
        i, y = rows.inputs, rows.labels[:, 0]
        which, factor = (y == self.top[i, 0]).long(), self.factor[i, y].unsqueeze(1)
        u = rows.minus(self.q[i, which]) * factor
        shift = (rows.kernel.columns(i, y) - self.moved[i, which]) * factor
        point, zeros = rows.point(u, shift), torch.zeros_like(u)
        mean = rows.point(zeros, zeros)
        return point.where(point.objective >= mean.objective, mean)

    def upper_bound(self, at_mean: Tensor) -> Tensor:
        """Bound every label's log_lik from above, (B, K)."""
        t = self.share
        entropies = torch.special.xlogy(t, t) + torch.special.xlogy(1 - t, 1 - t)
        bound = t * self.lead + t**2 * self.spread / 2 + entropies
        return (2 * bound - at_mean).clamp(max=0)

    def residual_at_mean(self, p: Tensor, kernel: Kernel) -> Tensor:
        """Return √((e_y - p)ᵀV(e_y - p)) for every label, (B, K)."""
        return gap_variances(kernel, p).clamp(min=0).sqrt()


def _share(lead: Tensor, spread: Tensor) -> Tensor:
    """Solve t = sigmoid(-(lead + t · spread)) roughly, by Newton steps: bounds hold for any t."""
    share = torch.sigmoid(-lead)
    for _ in range(SHARE_STEPS):
        s = torch.sigmoid(-(lead + share * spread))
        share = (share - (share - s) / (1 + spread * s * (1 - s))).clamp(0, 1)
    return share


def _blocks(indices: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split indices into blocks; without any there is no block."""
    return indices.split(size) if len(indices) else ()


def _left_out(gains: Tensor, negligible: float) -> Tensor:
    """Return the gains of labels to leave out, and 0 for the others, (B, K)."""
    ascending, order = gains.clamp(min=LEAST).sort(-1)
    kept = ~(ascending.cumsum(-1) <= negligible)
    return torch.zeros_like(gains).scatter(1, order, ascending.masked_fill(kept, 0.0))
