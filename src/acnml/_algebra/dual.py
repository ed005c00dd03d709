"""Points v of the dual space, θ = μ + Σv, stored as outer products where layers allow it.

An affine layer y = W a + b, Linear or Conv2d over unfolded patches, is one matrix [W b] of shape
(out, in + 1) that multiplies the input with a 1 appended. The gradient of one example with respect
to that matrix is a short sum of outer products δ aᵀ, and v is a weighted sum of gradients, so it
never has to be written out. Factors have shape `(*batch, terms, features)`, layer inputs
`(*batch, positions, features)`. Batch dimensions broadcast: what all labels of an input share is
stored once.

Nor is Σv written out. What a layer adds to its output for an input x is, for one outer product δaᵀ,

    diagonal, variances S       δ ⊙ S(a ⊙ x)
    Kronecker, in an eigenbasis the diagonal rule between two rotations
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml._util.params import Params

# The cost of writing a matrix (out, in) for every row, in products of such a matrix with a vector.
WRITING = 150

# How much faster such products run than gradients are written out in parts.
PAIRS = 2

# Numbers in one of these parts. It should fit into a core's cache.
TILE = 2**18


@final
@dataclass(frozen=True)
class Affine:
    """The parameter names of an affine layer; together they are the matrix [W b].

    A grouped convolution is a batch of independent layers: its matrices have shape (groups,
    out / groups, in [+ 1]). All other layers have groups = 1 and no such dimension.

    >>> posterior.blocks[0].layer
    Affine(weight='weight', bias='bias', groups=1)
    """

    weight: str
    bias: str | None = None
    groups: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The parameter names, weight first."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def join(self, params: Params, like: Params) -> Tensor:
        """Return [W b] as (*batch, [groups,] out, in [+ 1]), with kernel positions flattened."""
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
    """A sum of outer products Σ_t δ_t a_tᵀ: an affine layer's part of a dual point.

    Sums that hold the same tensor of inputs are merged when they are added.
    """

    deltas: Tensor  # (*batch, terms, out)
    inputs: Tensor  # (*batch, terms, in [+ 1]); ends with a 1 for a layer with bias

    def dense(self) -> Tensor:
        """Write the sum out as matrices (*batch, out, in [+ 1])."""
        columns = self.deltas.mT
        if self.inputs.ndim < 4 or self.inputs.shape[-3] > 1:
            return columns @ self.inputs
        # Rows that share their inputs take one matrix product.
        rows = columns.flatten(-3, -2) @ self.inputs.squeeze(-3)
        return rows.unflatten(-2, columns.shape[-3:-1])

    def scaled(self, factor: float | Tensor) -> Outers:
        """Multiply by a number, or by one per row (*batch)."""
        return self._replace(deltas=by_row(factor, self.deltas) * self.deltas)

    def where(self, rows: Tensor) -> Outers:
        """Set all rows but the chosen ones (*batch) to zero, even if they are not finite."""
        if self.inputs.shape[: rows.ndim] != rows.shape:  # all rows of an input share them
            return self._replace(deltas=_where(rows, self.deltas))
        return Outers(_where(rows, self.deltas), _where(rows, self.inputs))

    def combined(self, weights: Tensor) -> Outers:
        """Return Σ_c w_c δ_c aᵀ, see `Dual.combined`."""
        return self._replace(deltas=mix(weights, self.deltas))

    @staticmethod
    def total(parts: Sequence[Outers]) -> Outers:
        """Return the sum: deltas of the same inputs are added up, others become terms."""
        merged: dict[int, Outers] = {}
        for one in parts:
            known = merged.get(id(one.inputs))
            deltas = one.deltas if known is None else known.deltas + one.deltas
            merged[id(one.inputs)] = Outers(deltas, one.inputs)
        if len(merged) == 1:
            return next(iter(merged.values()))
        batch = torch.broadcast_shapes(*(one.deltas.shape[:-2] for one in parts))
        each = [
            torch.cat([tensor.expand(*batch, -1, -1) for tensor in tensors], dim=-2)
            for tensors in zip(*merged.values(), strict=True)
        ]
        return Outers(*each)


class Dual(NamedTuple):
    """A point v of the dual space, θ = μ + Σv: factored for some layers, dense for the rest."""

    dense: Params
    outers: Mapping[Affine, Outers]

    def scaled(self, factor: float | Tensor) -> Dual:
        """Multiply by a number, or by one per row (B, L)."""
        dense = {name: by_row(factor, v) * v for name, v in self.dense.items()}
        return Dual(dense, {k: o.scaled(factor) for k, o in self.outers.items()})

    def where(self, rows: Tensor) -> Dual:
        """Set all rows but the chosen ones (B, L) to zero, even if they are not finite."""
        return Dual(
            {n: _where(rows, v) for n, v in self.dense.items()},
            {k: o.where(rows) for k, o in self.outers.items()},
        )

    def combined(self, weights: Tensor) -> Dual:
        """Return Σ_c w_c v_c along the second batch dimension, for weights (B, L, C) and v (B, C).

        The inputs of outer products must be shared along it: (B, 1, ...).
        """
        outers = {layer: own.combined(weights) for layer, own in self.outers.items()}
        return Dual({name: mix(weights, v) for name, v in self.dense.items()}, outers)

    @staticmethod
    def total(parts: Sequence[Dual]) -> Dual:
        """Return the sum of several points."""
        names, layers = parts[0].dense, parts[0].outers
        dense = {name: reduce(torch.add, [v.dense[name] for v in parts]) for name in names}
        return Dual(dense, {k: Outers.total([v.outers[k] for v in parts]) for k in layers})

    def materialised(self, like: Params) -> Params:
        """Write all of v out as named tensors."""
        factored = [layer.split(outers.dense(), like) for layer, outers in self.outers.items()]
        return {name: v for part in (self.dense, *factored) for name, v in part.items()}


def combination(duals: Sequence[Dual], weights: Tensor) -> Dual:
    """Return Σ_i w_i v_i for weights (B, L, M) of M points (B, L, ...)."""
    tensors = (*duals[0].dense.values(), *(one.deltas for one in duals[0].outers.values()))
    shares = weights.to(tensors[0].dtype).unbind(-1)
    return Dual.total([v.scaled(share) for v, share in zip(duals, shares, strict=True)])


def by_row(values: float | Tensor, like: Tensor) -> float | Tensor:
    """Give values (*batch) as many dimensions as a tensor (*batch, ...) has, to broadcast them."""
    if not isinstance(values, Tensor):
        return values
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))


def _where(rows: Tensor, values: Tensor) -> Tensor:
    return torch.where(rows.view(*rows.shape, *[1] * (values.ndim - rows.ndim)), values, 0.0)


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Combine (B, C, ...) by weights (B, L, C) into (B, L, ...)."""
    return (weights @ values.flatten(2)).unflatten(2, values.shape[2:])


# What Σv does to the inputs of a layer -----------------------------------------------------------

# Maps input vectors (*batch, positions, in [+ 1]) to what Σv adds: (*batch, positions, out).
Action: TypeAlias = Callable[[Tensor], Tensor]


class Displacement(NamedTuple):
    """Σv for a dual point v: tensors where v is dense, actions on inputs where it is factored."""

    dense: Params
    actions: Mapping[Affine, Action]


def inner_product(dual: Dual, moved: Displacement) -> Tensor:
    """Return vᵀΣw of every row, (B, L), where `moved` is Σw.

    For outer products, ⟨Σ_t δ_t a_tᵀ, Σw⟩ = Σ_t δ_tᵀ (Σw)a_t.
    """
    pairs = [(v, moved.dense[name]) for name, v in dual.dense.items()]
    pairs += [(o.deltas, moved.actions[k](o.inputs)) for k, o in dual.outers.items()]
    return torch.stack([(a * b).flatten(2).sum(-1) for a, b in pairs]).sum(0)


def matrix_action(matrix: Tensor) -> Action:
    """Return the action of matrices (*batch, out, in) that are written out."""
    return lambda x: x @ matrix.mT


def diagonal_action(outers: Outers, var: Tensor, bias: Tensor | None = None) -> Action:
    """Return x ↦ Σ_t δ_t ⊙ S(a_t ⊙ x) for independent weights with variances S (out, in).

    Where inputs end with a 1 for a bias, its variances may be given apart: that needs no copy of S.
    """
    deltas, width = outers.deltas, var.shape[1]
    weights = Outers(deltas, outers.inputs[..., :width])

    def act(x: Tensor) -> Tensor:
        cheap = pairs_are_cheap(deltas.shape[-2], x.shape[-2])
        own = x[..., :width]
        added = _by_pairs(own, weights, var) if cheap else own @ (weights.dense() * var).mT
        return added if bias is None else added + deltas.sum(-2, keepdim=True) * bias

    return act


def _by_pairs(x: Tensor, outers: Outers, var: Tensor) -> Tensor:
    """Return Σ_t δ_t ⊙ S(a_t ⊙ x). Rows that share both inputs share the products."""
    terms = zip(outers.deltas.split(1, -2), outers.inputs.split(1, -2), strict=True)
    return reduce(torch.add, (((a * x) @ var.T) * delta for delta, a in terms))  # one at a time


def pairs_are_cheap(terms: int, positions: int) -> bool:
    """Whether a product with S for every pair takes less time than a v that is written out."""
    return terms * positions <= terms + positions + WRITING


# The covariance of gradients ----------------------------------------------------------------------


def gram(gradients: Tensor) -> Tensor:
    """Return the inner products (B, C, C) of gradients (B, C, ...)."""
    flat = gradients.flatten(2)
    return flat @ flat.mT


def diagonal_gram(jacobian: Outers, var: Tensor) -> Tensor:
    """Return JΣJᵀ (B, C, C) for C gradients in factors and independent weights.

    The gradients of an input share the a (B, 1, t, in). Pairs of t terms take t² products with S.
    Otherwise J √S is written out, in parts that stay in the cache.
    """
    deltas, a = jacobian.deltas, jacobian.inputs.squeeze(1)
    (_, count, terms, out_size), in_size = deltas.shape, a.shape[-1]
    if terms**2 <= PAIRS * count * (terms + count):
        moved = _by_pairs(jacobian.inputs, jacobian, var)
        return deltas.flatten(2) @ moved.flatten(2).mT
    columns, root = deltas.mT.flatten(1, 2), var.sqrt()
    inputs = max(1, TILE // (count * var.numel()))
    width = max(1, TILE // (inputs * count * out_size))
    parts = []
    for own, vectors in zip(columns.split(inputs), a.split(inputs), strict=True):
        total = own.new_zeros(len(own), count, count)
        for start in range(0, in_size, width):
            features = slice(start, start + width)
            tile = (own @ vectors[..., features]).unflatten(1, (count, out_size))
            total += gram(tile.mul_(root[:, features]))
        parts.append(total)
    return torch.cat(parts)
