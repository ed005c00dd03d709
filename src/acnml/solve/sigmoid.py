"""Independent labels: for each of them a single logit z, present with probability σ(z).

With a variance v of the logit, the shift that explains y ∈ {0, 1} best solves

    δ_y = v (y - σ(z + δ_y)),

and the probability of presence is p₁ = σ(z + δ₁) / (σ(z + δ₁) + 1 - σ(z + δ₀)). This is the softmax
over two classes with logits [0, z]: there only the difference of the logits counts, whose variance
is v for V = (v/2) I, and for V = diag(0, v).

One function has both solutions. Let g(a) solve x + v σ(x) = a. Then z + δ₀ = g(z) and, because
σ(-x) = 1 - σ(x), also z + δ₁ = -g(-z). For the same reason g(a) = -g(v - a), so the solution is
looked for where x ≤ 0. There σ(x) is close to exp(x), and Lambert's function has a start that is
below the solution by log 2 at most. Halley's steps then triple the digits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Halley's steps; the start is wrong by less than 0.7.
STEPS = {torch.float32: 2, torch.float64: 3}

# exp of this is negligible beside 1.
LEAST_EXPONENT = -40.0

# Numbers in a block: its tensors should stay in the processor's cache.
BLOCK = 2**15


def solve_sigmoid(logits: Tensor, var: Tensor) -> Tensor:
    """Return how well absence and presence are explained (..., 2) for logits z and variances v.

    The first number is log (1 - σ(z + δ₀)), the second log σ(z + δ₁). Both arguments have the same
    shape (...). The number of operations depends on the shape alone.
    """
    if torch.compiler.is_exporting() or logits.numel() <= BLOCK:
        both = torch.stack([logits, -logits], dim=-1)
        return functional.logsigmoid(-_solved(both, var.unsqueeze(-1)))
    parts = zip(logits.flatten().split(BLOCK), var.flatten().split(BLOCK), strict=True)
    return torch.cat([solve_sigmoid(*part) for part in parts]).unflatten(0, logits.shape)


def _solved(a: Tensor, v: Tensor) -> Tensor:
    """Return the x that solves x + v σ(x) = a."""
    is_mirrored = 2 * a > v
    a = torch.where(is_mirrored, v - a, a)
    log_v = v.clamp(min=torch.finfo(v.dtype).tiny).log()
    exponent = a + log_v
    # w with w + log w = a + log v, 2 % off (Iacono & Boyd 2017), where it is not negligible.
    s = functional.softplus(exponent.clamp(min=LEAST_EXPONENT))
    w = s * (1 - s.log1p() / (2 + s))
    x = torch.where(exponent > LEAST_EXPONENT, w.log() - log_v, a).clamp(max=0.0)
    for _ in range(STEPS[a.dtype]):
        p = torch.sigmoid(x)
        slope = v * p * (1 - p)
        excess, growth = x + v * p - a, 1 + slope
        bend = slope * (1 - 2 * p) / 2
        x = x - excess * growth / (growth * growth - excess * bend)
    return torch.where(is_mirrored, -x, x)
