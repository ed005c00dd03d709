"""Inner products vᵀΣw of dual points, from their factors."""

from __future__ import annotations

from torch import Tensor

from acnml._algebra.actions import Displacement
from acnml._algebra.dual import Dual


def gram(dual: Dual, moved: Displacement) -> Tensor:
    """Return v_cᵀ Σ v_c' for all pairs of the second batch dimension: (B, C, C), symmetric.

    `moved` is Σv.
    The inputs of outer products must be shared along it: (B, 1, ...).
    """
    total = sum(a.flatten(2) @ b.flatten(2).mT for a, b in _pairs(dual, moved))
    assert isinstance(total, Tensor)
    return (total + total.mT) / 2


def energy(dual: Dual, moved: Displacement) -> Tensor:
    """Return vᵀΣv of every row: (B, L)."""
    total = sum((a * b).flatten(2).sum(-1) for a, b in _pairs(dual, moved))
    assert isinstance(total, Tensor)
    return total


def _pairs(dual: Dual, moved: Displacement) -> list[tuple[Tensor, Tensor]]:
    """Return tensors (B, L, ...) whose inner products, summed over pairs, are vᵀΣv.

    For outer products, ⟨Σ_t δ_t a_tᵀ, Σv⟩ = Σ_t δ_tᵀ (Σv)a_t.
    """
    dense = [(v, moved.dense[name]) for name, v in dual.dense.items()]
    outers = [(o.deltas, moved.actions[k](o.inputs)) for k, o in dual.outers.items()]
    return dense + outers
