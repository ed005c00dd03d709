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

The second half of this file computes these sums for gradients, too: they need only the factors,
where autograd would keep every intermediate result of every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from acnml._util.params import Params

# Costs of handling a matrix (out, in), in products of such a matrix with one vector.
TILING = 40  # write it out tile by tile, so that it stays in the cache
KEEPING = 150  # write it out for every row and keep it in memory

# Numbers in gradients that are written out at once.
WRITTEN_OUT = 2**24

# Numbers in one tile of the matrices of an input's labels. It should fit into a core's cache.
TILE = 2**18


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

    Two sums of outer products with the same id can be merged.
    """

    vectors: Tensor  # (*batch, positions, in [+ 1]); ends with a 1 for a layer with bias
    id: int

    @staticmethod
    def new(vectors: Tensor) -> LayerInputs:
        """Give these vectors an id of their own."""
        return LayerInputs(vectors, next(_ids))


class Outers(NamedTuple):
    """A sum of outer products Σ_t δ_t a_tᵀ: an affine layer's part of a dual point."""

    deltas: Tensor  # (*batch, terms, out)
    inputs: LayerInputs  # (*batch, terms, in [+ 1])

    def dense(self) -> Tensor:
        """Write the sum out as matrices (*batch, out, in [+ 1])."""
        return self.deltas.mT @ self.inputs.vectors

    def scaled(self, factor: float | Tensor) -> Outers:
        """Multiply by a number, or by one per row (*batch)."""
        return self._replace(deltas=by_row(factor, self.deltas) * self.deltas)

    def where(self, rows: Tensor) -> Outers:
        """Set all rows but the chosen ones (*batch) to zero, even if they are not finite."""
        deltas, vectors = self.deltas, self.inputs.vectors
        deltas = _where(rows, deltas)
        if vectors.shape[: rows.ndim] != rows.shape:  # all rows of an input share them
            return self._replace(deltas=deltas)
        vectors = _where(rows, vectors)
        return Outers(deltas, LayerInputs.new(vectors))

    def combined(self, weights: Tensor) -> Outers:
        """Return Σ_c w_c δ_c aᵀ, see `Dual.combined`."""
        return self._replace(deltas=mix(weights, self.deltas))

    @staticmethod
    def total(parts: Sequence[Outers]) -> Outers:
        """Return the sum: deltas of the same inputs are added up, others become terms."""
        merged: dict[int, Outers] = {}
        for one in parts:
            known = merged.get(one.inputs.id)
            deltas = one.deltas if known is None else known.deltas + one.deltas
            merged[one.inputs.id] = Outers(deltas, one.inputs)
        if len(merged) == 1:
            return next(iter(merged.values()))
        batch = torch.broadcast_shapes(*(one.deltas.shape[:-2] for one in parts))
        vectors = [one.inputs.vectors.expand(*batch, -1, -1) for one in merged.values()]
        joined = [one.deltas.expand(*batch, -1, -1) for one in merged.values()]
        return Outers(torch.cat(joined, dim=-2), LayerInputs.new(torch.cat(vectors, dim=-2)))


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


def inner_product_pairs(dual: Dual, moved: Displacement) -> list[tuple[Tensor, Tensor]]:
    """Return tensors (B, L, ...) whose inner products, summed over pairs, are vᵀΣv.

    For outer products, ⟨Σ_t δ_t a_tᵀ, Σv⟩ = Σ_t δ_tᵀ (Σv)a_t.
    """
    dense = [(v, moved.dense[name]) for name, v in dual.dense.items()]
    outers = [(o.deltas, moved.actions[k](o.inputs.vectors)) for k, o in dual.outers.items()]
    return dense + outers


def covariance(jacobian: Dual, moved: Displacement) -> Tensor:
    """Return JΣJᵀ (B, C, C) for C gradients of each of B inputs, given ΣJᵀ."""
    pairs = inner_product_pairs(jacobian, moved)
    return torch.stack([a.flatten(2) @ b.flatten(2).mT for a, b in pairs]).sum(0)


def matrix_action(matrix: Tensor) -> Action:
    """Return the action of matrices (*batch, out, in) that are written out."""
    return lambda x: x @ matrix.mT


def diagonal_action(layer: Affine, outers: Outers, var: Params) -> Action:
    """Return the action for independent weights.

    That of a bias is the same for all inputs, and the matrix of variances needs no copy.
    """
    matrix, bias = var[layer.weight].flatten(1), None if layer.bias is None else var[layer.bias]
    width = matrix.shape[1]
    weights = Outers(outers.deltas, LayerInputs.new(outers.inputs.vectors[..., :width]))

    def act(x: Tensor) -> Tensor:
        added = variance_products(x[..., :width], weights, matrix)
        return added if bias is None else added + outers.deltas.sum(-2, keepdim=True) * bias

    return act


def variance_products(x: Tensor, outers: Outers, var: Tensor) -> Tensor:
    """Return Σ_t δ_t ⊙ S(a_t ⊙ x) for variances S (out, in)."""
    deltas, vectors = outers.deltas, outers.inputs.vectors
    terms, positions = deltas.shape[-2], x.shape[-2]
    rows = torch.broadcast_shapes(deltas.shape[:-2], x.shape[:-2]).numel()
    shared = torch.broadcast_shapes(vectors.shape[:-2], x.shape[:-2]).numel()
    # Rows that share their inputs share the products of pairs.
    by_pairs = terms * positions * shared <= diagonal_products(terms, positions) * rows
    rule = _by_pairs if by_pairs else _by_tiles
    # The adjoint is the same rule with a and δ exchanged, and S transposed.
    push = partial(rule, a=vectors, delta=deltas, var=var)
    pull = partial(rule, a=deltas, delta=vectors, var=var.T)
    added: Tensor = _Linear.apply(x, push, pull)
    return added


def diagonal_covariance(jacobian: Outers, var: Tensor) -> Tensor:
    """Return JΣJᵀ (B, C, C) for C gradients in factors and independent weights.

    Pairs of t terms take t² products with S. Otherwise J √S is written out, some inputs at a time.
    """
    delta, a = jacobian.deltas, jacobian.inputs.vectors
    count, terms = delta.shape[1:3]
    if terms**2 <= count * (terms + count):
        return delta.flatten(2) @ variance_products(a, jacobian, var).flatten(2).mT
    size, parts = max(1, WRITTEN_OUT // (count * var.numel())), []
    for own, vectors in zip(delta.split(size), a.split(size), strict=True):
        # The C gradients share the a, and take one matrix product.
        matrix = (own.mT.flatten(1, 2) @ vectors.squeeze(1)).unflatten(1, (count, -1))
        half = (matrix * var.sqrt()).flatten(2)
        parts.append(half @ half.mT)
    return torch.cat(parts)


def diagonal_products(terms: int, positions: int) -> int:
    """Count the products of δaᵀ ⊙ S with vectors: one per pair, or written out tile by tile."""
    return min(terms * positions, terms + positions + TILING)


def diagonal_prefers_factors(terms: int, positions: int, out_size: int) -> bool:
    """Compare the cost of v in factors with that of a v that is written out and kept.

    Where a layer has more positions than outputs, its unfolded inputs are larger than v.
    """
    in_factors = diagonal_products(terms, positions) if positions < out_size else terms * positions
    return in_factors <= 2 * positions + KEEPING


@final
class _Linear(torch.autograd.Function):
    """A linear map of x and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, push: Action, pull: Action) -> Tensor:
        ctx.pull, ctx.shape = pull, x.shape
        return push(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pull(grad).sum_to_size(ctx.shape), None, None


def _by_pairs(x: Tensor, a: Tensor, delta: Tensor, var: Tensor) -> Tensor:
    """Multiply with S once for every pair of term and position."""
    terms = zip(a.split(1, -2), delta.split(1, -2), strict=True)
    first, d = next(terms)
    added = ((first * x) @ var.T) * d
    for each, d in terms:
        added.addcmul_((each * x) @ var.T, d)  # in place, because these tensors are large
    return added


def _by_tiles(x: Tensor, a: Tensor, delta: Tensor, var: Tensor) -> Tensor:
    """Write Σ_t δ_t a_tᵀ ⊙ S out tile by tile."""
    batch = torch.broadcast_shapes(delta.shape[:-2], a.shape[:-2], x.shape[:-2])
    added = x.new_zeros(*batch, x.shape[-2], len(var))
    groups = (_groups(each, batch) for each in (added, delta, a, x))
    for into, d, vectors, own in zip(*groups, strict=True):
        for features, matrix in _tiles(d, vectors, var):
            own_features = own[..., features].expand(len(into), -1, -1)
            into.baddbmm_(own_features, matrix.expand(len(into), -1, -1).mT)
    return added


def _groups(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Turn (*batch, ...) into (inputs, labels or 1, ...): the last batch dimension are labels."""
    if not batch:
        return tensor[None, None]
    return tensor.expand(*batch[:-1], *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def _tiles(deltas: Tensor, vectors: Tensor, var: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield Σ_t δ_t a_tᵀ ⊙ S for some input features at a time: (labels, out, features).

    The δ and a of one input are (labels or 1, t, features).
    """
    labels, (out_size, in_size) = max(len(deltas), len(vectors)), var.shape
    columns = deltas.mT.contiguous()
    width = max(1, TILE // (labels * out_size))
    for start in range(0, in_size, width):
        features = slice(start, min(start + width, in_size))
        a = vectors[..., features]
        # Labels that share the a take one matrix product.
        one = len(a) == 1
        rows = (columns.flatten(0, 1) @ a[0]).unflatten(0, (-1, out_size)) if one else columns @ a
        yield features, rows.mul_(var[:, features])
