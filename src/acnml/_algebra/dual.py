"""Points of the dual space, v in θ = μ + Σv, kept as outer products where layers allow it.

An affine layer y = W a + b, be it Linear or Conv2d over unfolded patches, is one matrix [W b] of
shape (out, in + 1) acting on the input with a 1 appended. One example's gradient with respect to
that matrix is a short sum of outer products δ aᵀ, and v is a weighted sum of gradients: it need
never be written out. Factors are `(*batch, terms, features)`, layer inputs `(*batch, positions,
features)`, and batch dimensions broadcast: what the labels of an input share is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._util.params import Params, add, scale


@final
@dataclass(frozen=True)
class Affine:
    """The names of an affine layer's parameters; together they are the matrix [W b].

    A grouped convolution is a batch of independent layers: its matrices are (groups, out / groups,
    in [+ 1]). All others have groups = 1 and no such dimension.
    """

    weight: str
    bias: str | None = None
    groups: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The parameter names, weight first."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def join(self, params: Params, like: Params) -> Tensor:
        """Return [W b] as (*batch, [groups,] out, in [+ 1]), a kernel's positions flattened."""
        kernel_dims = like[self.weight].ndim - 1
        matrix = params[self.weight].flatten(-kernel_dims)
        if self.bias is not None:
            matrix = torch.cat([matrix, params[self.bias].unsqueeze(-1)], dim=-1)
        return matrix if self.groups == 1 else matrix.unflatten(-2, (self.groups, -1))

    def matrix_and_bias(self, params: Params) -> tuple[Tensor, Tensor | None]:
        """Return W as a matrix (out, in) and b apart, for a layer without groups."""
        return params[self.weight].flatten(1), None if self.bias is None else params[self.bias]

    def split(self, matrix: Tensor, like: Params) -> Params:
        """Invert `join`."""
        if self.groups > 1:
            matrix = matrix.flatten(-3, -2)
        batch, shape = matrix.shape[:-2], like[self.weight].shape
        if self.bias is None:
            return {self.weight: matrix.reshape(*batch, *shape)}
        weight = matrix[..., :-1].reshape(*batch, *shape)
        return {self.weight: weight, self.bias: matrix[..., -1]}


class Outers(NamedTuple):
    """A sum of outer products Σ_t δ_t a_tᵀ: an affine layer's part of a dual point."""

    deltas: Tensor  # (*batch, terms, out)
    inputs: Tensor  # (*batch, terms, in [+ 1]); a 1 at the end of each for a layer with bias

    def dense(self) -> Tensor:
        """Write the sum out as matrices (*batch, out, in [+ 1])."""
        return self.deltas.transpose(-1, -2) @ self.inputs

    def combined(self, weights: Tensor) -> Outers:
        """Return Σ_c w_c δ_c aᵀ, see `Dual.combined`."""
        return Outers(mix(weights, self.deltas), self.inputs)

    def blended(self, other: Outers, kept: float, new: float) -> Outers:
        """Return kept · self + new · other; terms of one and the same inputs tensor are merged."""
        if self.inputs is other.inputs:
            return Outers(torch.add(kept * self.deltas, other.deltas, alpha=new), self.inputs)
        batch = torch.broadcast_shapes(self.inputs.shape[:-2], other.inputs.shape[:-2])
        inputs = [o.inputs.expand(*batch, *o.inputs.shape[-2:]) for o in (self, other)]
        deltas = [kept * self.deltas, new * other.deltas]
        return Outers(torch.cat(deltas, dim=-2), torch.cat(inputs, dim=-2))


class Dual(NamedTuple):
    """A point v of the dual space, θ = μ + Σv: factored for some layers, dense for the rest."""

    dense: Params
    outers: Mapping[Affine, Outers]

    def blended(self, other: Dual, kept: float, new: float) -> Dual:
        """Return kept · v + new · other."""
        outers = {k: o.blended(other.outers[k], kept, new) for k, o in self.outers.items()}
        return Dual(add(scale(self.dense, kept), scale(other.dense, new)), outers)

    def combined(self, weights: Tensor) -> Dual:
        """Return Σ_c w_c v_c along the second batch dimension, for weights (B, L, C) and v (B, C).

        The inputs of outer products must be shared along it: (B, 1, ...).
        """
        outers = {k: o.combined(weights) for k, o in self.outers.items()}
        return Dual({name: mix(weights, v) for name, v in self.dense.items()}, outers)

    def materialised(self, like: Params) -> Params:
        """Write all of v out as named tensors."""
        factored = [layer.split(outers.dense(), like) for layer, outers in self.outers.items()]
        return {name: v for part in (self.dense, *factored) for name, v in part.items()}


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Combine (B, C, ...) by weights (B, L, C) into (B, L, ...)."""
    return (weights @ values.flatten(2)).unflatten(2, values.shape[2:])


# What other work with a matrix (out, in) costs, in products with it for one vector. Writing one out
# bit by bit, so that it stays in the cache:
WRITING = 40
# Writing it out for every row and keeping it, in memory:
KEEPING = 150


def diagonal_products(terms: int, positions: int) -> int:
    """Count the products of δaᵀ ⊙ S with vectors: one for every pair, or written out bit by bit."""
    return min(terms * positions, terms + positions + WRITING)


def diagonal_prefers_factors(terms: int, positions: int, out_size: int) -> bool:
    """Weigh v in factors against v that is written out and kept.

    Where a layer has more positions than outputs, its inputs, unfolded, are larger than v.
    """
    in_factors = diagonal_products(terms, positions) if positions < out_size else terms * positions
    return in_factors <= 2 * positions + KEEPING
