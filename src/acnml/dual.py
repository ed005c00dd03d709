"""Points of the dual space, v in θ = μ + Σv, kept as outer products where layers allow it.

An affine layer y = W a + b, be it Linear or Conv2d over unfolded patches, is one matrix [W b] of
shape (out, in + 1) acting on the input with a 1 appended. One example's gradient with respect to
that matrix is a short sum of outer products δ aᵀ, and v is a weighted sum of gradients: it need
never be written out. Factors are `(*batch, terms, features)`, layer inputs `(*batch, positions,
features)`, and batch dimensions broadcast: what the labels of an input share is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml.params import Params, add, scale

# Maps layer inputs (*batch, positions, in) to what a displacement of the layer's weights adds to
# its outputs, (*batch, positions, out).
Action: TypeAlias = Callable[[Tensor], Tensor]


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


class Dual(NamedTuple):
    """A point v of the dual space, θ = μ + Σv: factored for some layers, dense for the rest."""

    dense: Params
    outers: Mapping[Affine, Outers]

    def scaled(self, factor: float) -> Dual:
        """Return factor · v."""
        outers = {k: Outers(o.deltas * factor, o.inputs) for k, o in self.outers.items()}
        return Dual(scale(self.dense, factor), outers)

    def plus(self, other: Dual) -> Dual:
        """Return v + other; outer products of one and the same inputs tensor are merged."""
        outers = {layer: _sum(mine, other.outers[layer]) for layer, mine in self.outers.items()}
        return Dual(add(self.dense, other.dense), outers)

    def combined(self, weights: Tensor) -> Dual:
        """Return Σ_c w_c v_c along the second batch dimension, for weights (B, L, C) and v (B, C).

        The inputs of outer products must be shared along it: (B, 1, ...).
        """
        outers = {k: Outers(_mix(weights, o.deltas), o.inputs) for k, o in self.outers.items()}
        return Dual({name: _mix(weights, v) for name, v in self.dense.items()}, outers)

    def materialised(self, like: Params) -> Params:
        """Write all of v out as named tensors."""
        factored = [layer.split(outers.dense(), like) for layer, outers in self.outers.items()]
        return {name: v for part in (self.dense, *factored) for name, v in part.items()}


def _sum(a: Outers, b: Outers) -> Outers:
    if a.inputs is b.inputs:
        return Outers(a.deltas + b.deltas, a.inputs)
    batch = torch.broadcast_shapes(a.inputs.shape[:-2], b.inputs.shape[:-2])
    inputs = [o.inputs.expand(*batch, *o.inputs.shape[-2:]) for o in (a, b)]
    return Outers(torch.cat([a.deltas, b.deltas], dim=-2), torch.cat(inputs, dim=-2))


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Combine (B, C, ...) by weights (B, L, C) into (B, L, ...)."""
    return (weights @ values.flatten(2)).unflatten(2, values.shape[2:])


class Displacement(NamedTuple):
    """Σv for a dual point v: tensors where v was dense, actions on inputs where it was factored."""

    dense: Params
    actions: Mapping[Affine, Action]


def matrix_action(matrix: Tensor) -> Action:
    """Let a written-out displacement (*batch, out, in) act on inputs."""
    return lambda inputs: inputs @ matrix.transpose(-1, -2)


# Passing once over a matrix that must come from memory costs about as much as this many products
# with it that stay in the cache.
PASSES = 150


def diagonal_prefers_factors(terms: int, positions: int) -> bool:
    """Weigh a product with S for every term and position against v, written and applied."""
    return terms * positions <= 2 * positions + PASSES


def diagonal_action(outers: Outers, var: Tensor, bias_var: Tensor | None = None) -> Action:
    """Let Σv act for independent weights with variances S (out, in): Σ_t δ_t ⊙ S(a_t ⊙ a').

    A bias, whose 1 ends the inputs, adds its variances apart: an odd number of columns would slow
    down the matrix products, which are nearly all of the cost.
    """
    width = var.shape[1]
    known: dict[int, Tensor] = {}  # layers that see the same inputs at every step ask only once

    def spread(inputs: Tensor) -> Tensor:
        products = outers.inputs[..., :width].unsqueeze(-2) * inputs[..., :width].unsqueeze(-3)
        moved = products @ var.T  # (*batch, t, positions, out)
        return moved if bias_var is None else moved + bias_var

    def action(inputs: Tensor) -> Tensor:
        if inputs is outers.inputs:
            moved = known[0] if known else known.setdefault(0, spread(inputs))
        else:
            moved = spread(inputs)
        return (outers.deltas.unsqueeze(-2) * moved).sum(-3)

    return action


def diagonal_layer_action(layer: Affine, outers: Outers, var: Params) -> Action:
    """Return `diagonal_action` for the named variances of a layer."""
    bias_var = None if layer.bias is None else var[layer.bias]
    return diagonal_action(outers, var[layer.weight].flatten(1), bias_var)
