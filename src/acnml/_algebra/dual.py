"""Points v of the dual space, θ = μ + Σv, stored as outer products where layers allow it.

An affine layer y = W a + b, Linear or Conv2d over unfolded patches, is one matrix [W b] of shape
(out, in + 1) that multiplies the input with a 1 appended. The gradient of one example with respect
to that matrix is a short sum of outer products δ aᵀ, and v is a weighted sum of gradients, so it
never has to be written out. Factors have shape `(*batch, terms, features)`, layer inputs
`(*batch, positions, features)`. Batch dimensions broadcast: what all labels of an input share is
stored once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._util.params import Params


@final
@dataclass(frozen=True)
class Affine:
    """The parameter names of an affine layer; together they are the matrix [W b].

    A grouped convolution is a batch of independent layers: its matrices have shape (groups,
    out / groups, in [+ 1]). All other layers have groups = 1 and no such dimension.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
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

    def matrix_and_bias(self, params: Params) -> tuple[Tensor, Tensor | None]:
        """Return W as a matrix (out, in) and b separately, for a layer without groups."""
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


_ids = itertools.count()


class LayerInputs(NamedTuple):
    """Input vectors of an affine layer, with an id: equal ids mean equal vectors.

    The id survives a change of basis. Two sums of outer products with the same id can be merged,
    and a posterior can reuse what it computed for these inputs before.
    """

    vectors: Tensor  # (*batch, positions, in [+ 1]); ends with a 1 for a layer with bias
    id: int

    @staticmethod
    def new(vectors: Tensor) -> LayerInputs:
        """Give these vectors an id of their own."""
        return LayerInputs(vectors, next(_ids))

    def in_basis(self, basis: Tensor) -> LayerInputs:
        """Multiply the vectors by a matrix and keep the id."""
        return LayerInputs(self.vectors @ basis, self.id)


class Outers(NamedTuple):
    """A weighted sum of outer products w Σ_t δ_t a_tᵀ: an affine layer's part of a dual point."""

    deltas: Tensor  # (*batch, terms, out)
    inputs: LayerInputs  # (*batch, terms, in [+ 1])
    weight: float = 1.0

    def dense(self) -> Tensor:
        """Write the sum out as matrices (*batch, out, in [+ 1])."""
        return (self.weight * self.deltas).transpose(-1, -2) @ self.inputs.vectors

    def scaled(self, factor: float | Tensor) -> Outers:
        """Multiply by a number, or by one per row (*batch)."""
        if isinstance(factor, Tensor):
            return self._replace(deltas=by_row(factor, self.deltas) * self.deltas)
        return self._replace(weight=factor * self.weight)

    def where(self, rows: Tensor) -> Outers:
        """Set all rows but the chosen ones (*batch) to zero, even if they are not finite."""
        deltas, vectors = self.deltas, self.inputs.vectors
        deltas = torch.where(by_row(rows, deltas), deltas, 0.0)
        if vectors.shape[: rows.ndim] != rows.shape:  # all rows of an input share them
            return self._replace(deltas=deltas)
        vectors = torch.where(by_row(rows, vectors), vectors, 0.0)
        return self._replace(deltas=deltas, inputs=LayerInputs.new(vectors))

    def combined(self, weights: Tensor) -> Outers:
        """Return Σ_c w_c δ_c aᵀ, see `Dual.combined`."""
        return self._replace(deltas=mix(weights, self.deltas))

    def merged(self, other: Outers) -> Outers:
        """Return the sum with outer products of the same inputs."""
        deltas = torch.add(self.weight * self.deltas, other.deltas, alpha=other.weight)
        return Outers(deltas, self.inputs)

    def plus(self, other: Outers) -> Outers:
        """Return the sum: terms are merged if the inputs are the same, and concatenated if not."""
        if self.inputs.id == other.inputs.id:
            return self.merged(other)
        both = (self, other)
        batch = torch.broadcast_shapes(*(each.inputs.vectors.shape[:-2] for each in both))
        vectors = [v.expand(*batch, *v.shape[-2:]) for v in (each.inputs.vectors for each in both)]
        deltas = [each.weight * each.deltas for each in both]
        return Outers(torch.cat(deltas, dim=-2), LayerInputs.new(torch.cat(vectors, dim=-2)))


class Dual(NamedTuple):
    """A point v of the dual space, θ = μ + Σv: factored for some layers, dense for the rest."""

    dense: Params
    outers: Mapping[Affine, Outers]

    def scaled(self, factor: float | Tensor) -> Dual:
        """Multiply by a number, or by one per row (B, L)."""
        dense = {
            name: (by_row(factor, v) if isinstance(factor, Tensor) else factor) * v
            for name, v in self.dense.items()
        }
        return Dual(dense, {k: o.scaled(factor) for k, o in self.outers.items()})

    def where(self, rows: Tensor) -> Dual:
        """Set all rows but the chosen ones (B, L) to zero, even if they are not finite."""
        dense = {n: torch.where(by_row(rows, v), v, 0.0) for n, v in self.dense.items()}
        return Dual(dense, {k: o.where(rows) for k, o in self.outers.items()})

    def plus(self, other: Dual) -> Dual:
        """Return v + other."""
        outers = {layer: own.plus(other.outers[layer]) for layer, own in self.outers.items()}
        return Dual({name: v + other.dense[name] for name, v in self.dense.items()}, outers)

    def combined(self, weights: Tensor) -> Dual:
        """Return Σ_c w_c v_c along the second batch dimension, for weights (B, L, C) and v (B, C).

        The inputs of outer products must be shared along it: (B, 1, ...).
        """
        outers = {layer: own.combined(weights) for layer, own in self.outers.items()}
        return Dual({name: mix(weights, v) for name, v in self.dense.items()}, outers)

    def materialised(self, like: Params) -> Params:
        """Write all of v out as named tensors."""
        factored = [layer.split(outers.dense(), like) for layer, outers in self.outers.items()]
        return {name: v for part in (self.dense, *factored) for name, v in part.items()}


def combination(duals: Sequence[Dual], weights: Tensor) -> Dual:
    """Return Σ_i w_i v_i for weights (B, L, M) of M points (B, L, ...).

    Outer products of the same inputs are merged, others become terms.
    """
    tensors = (*duals[0].dense.values(), *(one.deltas for one in duals[0].outers.values()))
    shares = weights.to(tensors[0].dtype).unbind(-1)
    scaled = [v.scaled(share) for v, share in zip(duals, shares, strict=True)]
    dense = {name: reduce(torch.add, [v.dense[name] for v in scaled]) for name in duals[0].dense}
    outers = {layer: _joined([v.outers[layer] for v in scaled]) for layer in duals[0].outers}
    return Dual(dense, outers)


def _joined(parts: Sequence[Outers]) -> Outers:
    """Return the sum: deltas of the same inputs are added up, others are concatenated once."""
    merged: dict[int, Outers] = {}
    for one in parts:
        known = merged.get(one.inputs.id)
        merged[one.inputs.id] = one if known is None else known.merged(one)
    each = list(merged.values())
    if len(each) == 1:
        return each[0]
    batch = torch.broadcast_shapes(*(one.deltas.shape[:-2] for one in each))
    vectors = [one.inputs.vectors.expand(*batch, -1, -1) for one in each]
    deltas = [(one.weight * one.deltas).expand(*batch, -1, -1) for one in each]
    return Outers(torch.cat(deltas, dim=-2), LayerInputs.new(torch.cat(vectors, dim=-2)))


def by_row(values: Tensor, like: Tensor) -> Tensor:
    """Give values (*batch) as many dimensions as a tensor (*batch, ...) has, to broadcast them."""
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Combine (B, C, ...) by weights (B, L, C) into (B, L, ...)."""
    return (weights @ values.flatten(2)).unflatten(2, values.shape[2:])
