"""Many classes whose logits depend on each other: the unlikely ones are merged, then put right.

Whatever the label, most of the probability that it does not get lies on the same few classes. Let p̄
be the solution without a label, and r its restriction to all classes but the likely ones, scaled to
sum to 1. If probability outside of the likely classes and y is spread like r, u = e_y - Φc, where c
has an entry for each likely class, one for r and one for y. That is the same problem again with few
classes: its kernel is ΦᵀVΦ, its logits are Φᵀz₀, with the entropy of r added to that of r.

One step in all classes then puts u right. At u, with z = z₀ + Vu, p = softmax(z) and the gap
F = e_y - p - u, take the Newton direction v = (I + HD)⁻¹F for D, the diagonal of V. What is left at
u + v is, with V = D + E, δ = Vv and H = diag(p) - ppᵀ,

    F' = [p + Hδ - softmax(z + δ)] - HEv.

The product Ev would cost more than all the rest. It is known for the likely classes, whose columns
are at hand; elsewhere |Ev|_k ≤ ‖E_k‖‖v‖. Let η be what bounds |Ev|, with roundings of z counted in,
and b = |Dv| + η ≥ |δ|. Then, with ⟨·⟩ for expectations under p,

    ‖HEv‖ ≤ ‖p ⊙ η‖ + ‖p‖⟨η⟩,    ‖p + Hδ - softmax(z + δ)‖ ≤ exp(4 max b) (‖p ⊙ b²‖ + 3 ‖p‖⟨b²⟩).

The second: with a = δ - ⟨δ⟩ and M = ⟨eᵃ⟩ it is p ⊙ (eᵃ/M - 1 - a), where |a| ≤ 2 max b,
a² ≤ 2b² + 2⟨b²⟩ and 0 ≤ M - 1 ≤ ½⟨b²⟩ exp(2 max b). The residual is √(F'ᵀVF') ≤ √λ ‖F'‖ with the
largest eigenvalue λ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.kernels import BorderedKernel, Kernel, Norms, solved_as_if_diagonal
from acnml._algebra.newton import solve_logits
from acnml.head.independent import without_label

# Classes that are not merged. More make Newton's steps dearer, fewer the step after them too rough.
LIKELY = 64

# Rounds in which p̄ takes note of covariances.
ROUNDS = 3

# Labels put right at once: their K-dimensional vectors should stay in the processor's cache.
AT_ONCE = 256

# Newton steps for the merged problem; what they leave undone is seen in the residual.
STEPS = 20

# A logit and a probability of no consequence, yet finite.
NEVER, FAINT = -1e5, 1e-30


class Step(NamedTuple):
    """Labels of one input, put right."""

    log_lik: Tensor  # (L,)
    residual: Tensor  # (L,), an upper bound
    coefficients: Tensor  # u (L, K)


def background(logits: Tensor, kernel: Kernel, var: Tensor) -> Tensor:
    """Return p̄ = softmax(z₀ - Vp̄), roughly, for inputs (B, K) whose kernel has the diagonal var."""
    shifted = logits
    for _ in range(ROUNDS):
        p = without_label(shifted, var)
        shifted = logits - (kernel.mv(p.unsqueeze(1)).squeeze(1) - var * p)
    return p


@final
@dataclass(frozen=True, eq=False)
class Merged:
    """One input, its unlikely classes merged. All tensors are in the precision that suffices."""

    logits: Tensor  # z₀ (K,)
    kernel: Kernel  # of this one input
    var: Tensor  # its diagonal (K,)
    likely: Tensor  # the classes that are not merged (m,)
    rest: Tensor  # r (K,)
    columns: Tensor  # VΦ but for the label's column, (m + 1, K)
    off: Tensor  # ‖E_k‖ (K,)
    largest: Tensor  # λ, no eigenvalue is above it

    @staticmethod
    def of(logits: Tensor, kernel: Kernel, var: Tensor, norms: Norms, p: Tensor) -> Merged:
        """Prepare an input with logits, variances and p̄ (1, K), in its kernel's precision."""
        likely = p[0].topk(min(LIKELY, p.shape[1] // 2)).indices
        rest = p[0].clamp(min=FAINT).index_fill(0, likely, 0.0)
        columns = kernel.rows(likely)[0]
        rest = (rest / rest.sum()).to(columns.dtype)
        columns = torch.cat([columns, kernel.mv(rest[None, None])[0]])
        shifted = logits[0] - logits.max()
        shifted, own, off = (t.to(columns.dtype) for t in (shifted, var[0], norms.off[0]))
        return Merged(shifted, kernel, own, likely, rest, columns, off, norms.largest[0])

    def solve(self, labels: Tensor, tolerance: float) -> Tensor:
        """Return c (L, m + 2) of the merged problem of labels (L,)."""
        shared = torch.cat([self.columns[:, self.likely], (self.columns @ self.rest)[:, None]], 1)
        kernel = BorderedKernel(
            (shared + shared.T) / 2, self.columns[:, labels].T, self.var[labels, None]
        )
        entropy = torch.special.entr(self.rest).sum()
        merged = (self.rest @ self.logits + entropy + torch.log1p(-self.rest[labels])).clamp(NEVER)
        likely = self.logits[self.likely].expand(len(labels), -1)
        likely = likely.masked_fill(self.likely == labels[:, None], NEVER)
        logits = torch.cat([likely, merged[:, None], self.logits[labels, None]], 1)
        last = torch.tensor([logits.shape[1] - 1], device=labels.device)
        solved = solve_logits(logits.double(), kernel.double(), last, tolerance, STEPS)
        return _at(-solved.coefficients[:, 0], last, 1.0).to(self.logits.dtype)

    def put_right(self, labels: Tensor, c: Tensor) -> Step:
        """Take one step in all classes from u = e_y - Φc."""
        guess = (c[:, -2:-1] * self.rest).index_add_(1, self.likely, c[:, :-2])
        guess = _at(guess, labels, c[:, -1])  # Φc
        z = torch.addmm(self.logits, c[:, :-1], self.columns, alpha=-1)
        z.addcmul_(self.kernel.rows(labels)[0], 1 - c[:, -1:])
        log_probs = torch.log_softmax(z, -1)
        p = log_probs.exp()
        v = solved_as_if_diagonal(self.var[None], p[None], (guess - p)[None])[0]
        moved = v * self.var  # Dv
        means = (p * moved).sum(-1), (p * moved**2).sum(-1)
        log_lik = (log_probs + moved).gather(1, labels[:, None])[:, 0]
        log_lik = log_lik - (means[0] + means[1] / 2).log1p()
        return Step(log_lik, self._residual(p, v, moved), _at(v - guess, labels, 1.0))

    def _residual(self, p: Tensor, v: Tensor, moved: Tensor) -> Tensor:
        """Bound the residual after the step, as shown at the top of this file."""
        known = v @ self.columns[:-1].T - moved[:, self.likely]  # Ev at the likely classes
        eta = v.norm(dim=-1, keepdim=True) * self.off
        eta[:, self.likely] = known.abs()
        eta += rounding(self.var)
        b = moved.abs_().add_(eta)
        norm, apart, squares = p.norm(dim=-1), eta.mul_(p), b**2 * p
        left = apart.norm(dim=-1) + norm * apart.sum(-1)
        left += (4 * b.amax(-1)).exp() * (squares.norm(dim=-1) + 3 * norm * squares.sum(-1))
        return self.largest.sqrt() * left


def rounding(var: Tensor) -> Tensor:
    """Estimate by how much z is off for being computed in the precision of the variances (K,)."""
    return torch.finfo(var.dtype).eps * (8 + 2 * var.max())


def _at(vectors: Tensor, labels: Tensor, value: Tensor | float) -> Tensor:
    """Add something to the label's entry of every row, in place."""
    vectors[torch.arange(len(vectors), device=labels.device), labels] += value
    return vectors
