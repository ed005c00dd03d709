"""Rules: from logits and a score of atypicality to how well every label can be explained.

All rules take logits z (B, K), already divided by the temperature, and a *spread* v (B,),

    v(x) = α m(x)²,

where m(x) is the score of `acnml.atypicality.Atypicality`. For v = 0 each of them returns
log softmax(z). A larger spread is never surer, and no rule changes the order of the classes.

- `closed-form`, the default: predictive NML of a linear head under squared loss, whose leverage
  φᵀ(ΦᵀΦ)⁻¹φ is a Mahalanobis distance (Bibas, Feder & Hassner 2021):
  log p_y / (p_y + p_y^h (1 - p_y)) with h = v / (1 + v).
- `acnml`: log p_θ̂_y(y|x), NML under the log loss, for logits with covariance V = vI: the posterior
  of the same head, W | data ~ MN(μ, (ΦᵀΦ)⁻¹, σ²I). For two classes only the difference of the
  logits counts, whose variance is 2v.
- `density-temperature`: log softmax(z / (1 + v)), a baseline without a regret (Tomani et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from acnml.solve.isotropic import solve_isotropic
from acnml.solve.sigmoid import solve_sigmoid

RuleName: TypeAlias = Literal["closed-form", "acnml", "density-temperature"]

# The power of the score in the spread.
POWER = 2

# A larger spread counts as this one, so that it stays finite.
LARGEST_SPREAD = 1e30

# ACNML is solved for spreads up to this one.
MOST_SOLVED = 1e6


def spread(alpha: float | Tensor, score: Tensor) -> Tensor:
    """Return v = α m² (B,)."""
    return (alpha * score**POWER).clamp(max=LARGEST_SPREAD)


def acnml(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) for V = vI."""
    # Beyond what is solved, predictions depend on logits / v alone, nearly: both are scaled down.
    # With v alone cut, the logits of huge inputs would win in the end.
    excess = (var / MOST_SOLVED).clamp(min=1)
    logits, var = logits / excess.unsqueeze(-1), var / excess
    if logits.shape[1] == 2:
        return solve_sigmoid(logits[:, 1] - logits[:, 0], 2 * var)
    return solve_isotropic(logits, var)


def regret_of(log_lik: Tensor) -> Tensor:
    """Return log C(x) (B,) from log p_θ̂_y(y|x) (B, K), without what rounding adds to its limits."""
    return torch.logsumexp(log_lik, dim=-1).clamp(0.0, math.log(log_lik.shape[-1]))


def closed_form(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_y / (p_y + p_y^h (1 - p_y)) (B, K) with h = v / (1 + v)."""
    log_probs = torch.log_softmax(logits, dim=-1)
    h = (var / (1 + var)).unsqueeze(-1)
    # -log(1 + p_y^(h - 1) (1 - p_y)), a form in which nothing cancels.
    exponent = (h - 1) * log_probs + _log_others(log_probs)
    return -torch.logaddexp(torch.zeros_like(exponent), exponent)


def _log_others(log_probs: Tensor) -> Tensor:
    """Return log (1 - p_y) (B, K); for the likeliest label as a sum, because 1 - p_y cancels."""
    top = log_probs.argmax(-1, keepdim=True)
    of_top = torch.logsumexp(log_probs.scatter(1, top, -torch.inf), dim=-1, keepdim=True)
    return torch.log1p(-log_probs.exp().scatter(1, top, 0.0)).scatter(1, top, of_top)


def density_temperature(logits: Tensor, var: Tensor) -> Tensor:
    """Return log softmax(z / (1 + v)) (B, K)."""
    return torch.log_softmax(logits / (1 + var).unsqueeze(-1), dim=-1)


RULES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "closed-form": closed_form,
    "acnml": acnml,
    "density-temperature": density_temperature,
}
assert set(RULES) == set(get_args(RuleName))
