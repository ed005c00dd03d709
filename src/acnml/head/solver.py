"""A posterior over a last Linear layer: the problem is linear, and exact in logit space.

With many classes most labels cannot be made likely by any weights that the posterior allows. They
are left out of the normaliser C(x) where a bound proves that it hardly changes.

The bound. For any probabilities q with entropy S(q), Gibbs' inequality says log Σ_c exp(z_c) ≥
qᵀz + S(q). At the solution for a label y, z = z₀ + V(e_y - p), and so

    log p_θ̂_y(y|x) ≤ (e_y - q)ᵀz - S(q)
                   = z₀_y - qᵀz₀ - S(q) + V_yy - (Vq)_y + (Vq - Ve_y)ᵀp,

where the last term is at most max_c (Vq)_c + ‖E_y‖, with E_y the row of y but for the diagonal. The
bound is nearly tight for q = p̄, the solution without a label. From below p_θ̂_y(y|x) is bounded by
the label's probability at the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml._algebra.kernels import DiagonalKernel, Kernel, Norms
from acnml._algebra.newton import solve_logits
from acnml.head.independent import solve_independent
from acnml.head.merged import AT_ONCE, Merged, Step, background, rounding

# Up to this many classes every label is solved for by Newton steps in all classes.
FEW_CLASSES = 64

# A label left out adds no less than this: 0 would say that it was solved for.
LEAST = 1e-30


class Precision(NamedTuple):
    """How exactly to solve."""

    tolerance: float  # largest residual
    steps: int  # Newton steps at most
    negligible: float  # what the labels left out may add to C(x), all together


class HeadSolution(NamedTuple):
    """All labels of a block of inputs."""

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K)
    omitted: Tensor  # (B, K) what a label left out adds to C(x) at most


class Shared(NamedTuple):
    """What the labels of an input have in common, for some inputs side by side."""

    logits: Tensor  # z₀ (B, K)
    kernel: Kernel
    single: Kernel  # the same in single precision
    var: Tensor  # the diagonal of the kernel (B, K)
    norms: Norms  # of the kernel
    p: Tensor  # p̄ (B, K), nearly

    @staticmethod
    def of(logits: Tensor, kernel: Kernel) -> Shared:
        """Look at inputs without a label."""
        kernels, var = (kernel, kernel.to(torch.float32)), kernel.diagonal()
        return Shared(logits, *kernels, var, kernel.norms(), background(logits, kernel, var))

    def take(self, rows: slice) -> Shared:
        """Return some inputs."""
        return Shared(
            self.logits[rows],
            self.kernel.take(rows),
            self.single.take(rows),
            self.var[rows],
            self.norms.take(rows),
            self.p[rows],
        )


def solve_head(logits: Tensor, kernel: Kernel, precision: Precision, at_once: int) -> HeadSolution:
    """Solve for all labels that matter, some labels at once. Left-out ones stay at the mean."""
    if logits.shape[1] <= FEW_CLASSES:
        return _few_classes(logits, kernel, precision, at_once)
    if isinstance(kernel, DiagonalKernel):
        return _independent(logits, kernel, precision, at_once)
    shared = Shared.of(logits, kernel)
    log_lik, residual = _at_mean(shared)
    omitted = _omitted(shared, precision.negligible)
    for i, labels in enumerate((row == 0).nonzero()[:, 0] for row in omitted):
        solved = _merged(shared.take(slice(i, i + 1)), labels, precision, at_once)
        log_lik[i, labels], residual[i, labels] = solved
    return HeadSolution(log_lik, residual, omitted)


def _few_classes(
    logits: Tensor, kernel: Kernel, precision: Precision, at_once: int
) -> HeadSolution:
    classes = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    parts = [_newton(logits, kernel, some, precision) for some in classes.split(at_once, dim=1)]
    log_lik, residual = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    return HeadSolution(log_lik, residual, torch.zeros_like(log_lik))


def _independent(
    logits: Tensor, kernel: DiagonalKernel, precision: Precision, at_once: int
) -> HeadSolution:
    """Solve for all labels: with independent logits they cost next to nothing."""
    log_lik, residual = solve_independent(logits, kernel.var, precision.tolerance)
    unsolved = ~(residual <= precision.tolerance)  # not a number is not solved
    for i in unsolved.any(-1).nonzero()[:, 0].tolist():
        one = slice(i, i + 1)
        for labels in unsolved[i].nonzero()[:, 0].split(at_once):
            solved = _newton(logits[one], kernel.take(one), labels[None], precision)
            log_lik[i, labels], residual[i, labels] = (part[0] for part in solved)
    return HeadSolution(log_lik, residual, torch.zeros_like(log_lik))


def _merged(
    shared: Shared, labels: Tensor, precision: Precision, at_once: int
) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods and residuals of labels (L,) of one input, most classes merged."""
    merged, parts = _in_sufficient_precision(shared, precision.tolerance), []
    for block in labels.split(at_once):
        rough = merged.solve(block, precision.tolerance)
        for some, c in zip(block.split(AT_ONCE), rough.split(AT_ONCE), strict=True):
            parts.append(_finished(shared, some, merged.put_right(some, c), precision))
    log_lik, residual = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return log_lik, residual


def _in_sufficient_precision(shared: Shared, tolerance: float) -> Merged:
    """Merge an input's classes in single precision if its roundings leave room for the rest."""
    lost = (2 * shared.norms.largest.sqrt()).clamp(min=1) * rounding(shared.var.float())
    kernel = shared.single if bool((lost <= tolerance / 2).all()) else shared.kernel
    return Merged.of(shared.logits, kernel, shared.var, shared.norms, shared.p)


def _finished(
    shared: Shared, labels: Tensor, step: Step, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Go on by Newton steps where the step was not enough."""
    log_lik, residual = step.log_lik.double(), step.residual.double()
    unsolved = ~(residual <= precision.tolerance)
    if bool(unsolved.any()):
        rest, start = labels[unsolved][None], step.coefficients[unsolved][None].double()
        solved = _newton(shared.logits, shared.kernel, rest, precision, start)
        log_lik[unsolved], residual[unsolved] = (part[0] for part in solved)
    return log_lik, residual


def _newton(
    logits: Tensor,
    kernel: Kernel,
    labels: Tensor,
    precision: Precision,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods and residuals of labels (B, L), by Newton steps in all classes."""
    solved = solve_logits(logits, kernel, labels, precision.tolerance, precision.steps, start)
    return solved.log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), solved.residual


def _at_mean(shared: Shared) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods and residuals √(gᵀVg) of all labels at u = 0, where g = e_y - p."""
    log_probs = torch.log_softmax(shared.logits, dim=-1)
    p = log_probs.exp()
    moved = shared.kernel.mv(p.unsqueeze(1)).squeeze(1)
    squared = shared.var - 2 * moved + (p * moved).sum(-1, keepdim=True)
    return log_probs, squared.clamp(min=0).sqrt()


def _omitted(shared: Shared, negligible: float) -> Tensor:
    """Return what each label adds at most that is left out, and 0 for the others, (B, K)."""
    added = (upper_bounds(shared) - shared.logits.softmax(-1)).clamp(min=LEAST)
    ascending, order = added.sort(-1)
    kept = ascending.cumsum(-1) > negligible
    return torch.zeros_like(added).scatter(1, order, ascending.masked_fill(kept, 0.0))


def upper_bounds(shared: Shared) -> Tensor:
    """Bound p_θ̂_y(y|x) from above for every label, (B, K)."""
    logits, q = shared.logits, shared.p
    moved = shared.kernel.mv(q.unsqueeze(1)).squeeze(1)  # Vq
    least = (q * logits + torch.special.entr(q)).sum(-1, keepdim=True)
    reach = shared.var - moved + moved.amax(-1, keepdim=True) + shared.norms.off
    return (logits - least + reach).clamp(max=0).exp()
