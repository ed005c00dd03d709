"""What Σv adds to the outputs of affine layers, for a v in factors that is never written out.

For one outer product v = δaᵀ and a layer input a', the displacement adds

    diagonal, variances S       δ ⊙ S(a ⊙ a')
    Kronecker, in an eigenbasis the diagonal rule between two rotations

Shapes are those of `dual.py`: factors (*batch, terms, features), inputs (*batch, positions, in).
The rules at the end of this file compute these sums differentiably. Their gradients need only the
factors, where autograd would keep every intermediate result of every row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from acnml._algebra.dual import Affine, LayerInputs, Outers, by_row, mix
from acnml._util.params import Params

if TYPE_CHECKING:
    from typing_extensions import Self

# Sums of outer products that are added up. They share a layer and a basis.
Terms: TypeAlias = tuple[Outers, ...]

# A number, or one per row (*batch).
Weight: TypeAlias = float | Tensor

# Costs of handling a matrix (out, in), in products of such a matrix with one vector.
TILING = 40  # write it out tile by tile, so that it stays in the cache
KEEPING = 150  # write it out for every row and keep it in memory

# Numbers in one tile of the matrices of an input's labels. It should fit into a core's cache.
TILE = 2**18


class Action(ABC):
    """A displacement Σv of one layer, acting on its inputs. It is linear in v."""

    @abstractmethod
    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Map inputs (*batch, positions, in [+ 1]) to what is added: (*batch, positions, out)."""

    @abstractmethod
    def combined(self, weights: Tensor) -> Self:
        """Return the action of Σ_c w_c v_c, see `Dual.combined`."""

    @abstractmethod
    def blended(self, other: Self, kept: Weight, new: Weight) -> Self:
        """Return the action of kept · v + new · v', where `other` is the action of v'."""


class Displacement(NamedTuple):
    """Σv for a dual point v: tensors where v is dense, actions on inputs where it is factored."""

    dense: Params
    actions: Mapping[Affine, Action]

    def combined(self, weights: Tensor) -> Displacement:
        """Return Σ applied to Σ_c w_c v_c, see `Dual.combined`."""
        dense = {name: mix(weights, moved) for name, moved in self.dense.items()}
        return Displacement(dense, {k: a.combined(weights) for k, a in self.actions.items()})

    def blended(self, other: Displacement, kept: Weight, new: Weight) -> Displacement:
        """Return kept · Σv + new · Σv', where `other` is Σv'."""
        return Displacement(
            {n: _blend(d, other.dense[n], kept, new) for n, d in self.dense.items()},
            {k: a.blended(other.actions[k], kept, new) for k, a in self.actions.items()},
        )


@final
@dataclass(frozen=True, eq=False)
class MatrixAction(Action):
    """A displacement that is written out: matrices (*batch, out, in)."""

    matrix: Tensor

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Multiply."""
        return inputs.vectors @ self.matrix.transpose(-1, -2)

    def combined(self, weights: Tensor) -> MatrixAction:
        """Combine the matrices."""
        return MatrixAction(mix(weights, self.matrix))

    def blended(self, other: MatrixAction, kept: Weight, new: Weight) -> MatrixAction:
        """Blend the matrices."""
        return MatrixAction(_blend(self.matrix, other.matrix, kept, new))


@final
@dataclass(frozen=True, eq=False)
class DiagonalAction(Action):
    """Σ_t δ_t ⊙ S(a_t ⊙ a') for independent weights with variances S (out, in).

    The variances of a bias are kept separately: its contribution is the same for all inputs.
    """

    terms: Terms
    var: Tensor
    bias_var: Tensor | None = None
    # S(a ⊙ a) for the inputs a of the terms themselves, by id. All actions derived from this one
    # share it: a first layer sees the same inputs at every step, and computes this only once.
    products_with_itself: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Multiply with S for every pair of term and position, or write Σv out tile by tile."""
        terms = sum(one.deltas.shape[-2] for one in self.terms)
        positions = inputs.vectors.shape[-2]
        pairs, products = terms * positions, diagonal_products(terms, positions)
        rows = self.terms[0].deltas.shape[:-2].numel()
        own = len(self.terms) == 1 and inputs.id == self.terms[0].inputs.id
        if own and pairs * inputs.vectors.shape[:-2].numel() <= products * rows:
            return self._on_own_inputs()
        rule = _PairRule if pairs == products else _TiledRule
        added: Tensor = rule.apply(inputs.vectors, self.terms, self.var)
        if self.bias_var is None:
            return added
        deltas = _total(one.weight * one.deltas.sum(-2, keepdim=True) for one in self.terms)
        return added + deltas * self.bias_var

    def combined(self, weights: Tensor) -> DiagonalAction:
        """Combine the δ."""
        return replace(self, terms=_combined(self.terms, weights))

    def blended(self, other: DiagonalAction, kept: Weight, new: Weight) -> DiagonalAction:
        """Join the terms."""
        return replace(self, terms=_blended(self.terms, other.terms, kept, new))

    def _on_own_inputs(self) -> Tensor:
        """Look up S(a_t ⊙ a_p) for all pairs of terms and positions."""
        (term,) = self.terms
        if term.inputs.id not in self.products_with_itself:
            a = term.inputs.vectors[..., : self.var.shape[1]]
            moved = (a.unsqueeze(-2) * a.unsqueeze(-3)) @ self.var.T  # (*batch, t, p, out)
            moved = moved if self.bias_var is None else moved + self.bias_var
            self.products_with_itself[term.inputs.id] = moved
        moved = self.products_with_itself[term.inputs.id]
        return (term.weight * term.deltas.unsqueeze(-2) * moved).sum(-3)


@final
@dataclass(frozen=True, eq=False)
class RotatedAction(Action):
    """The diagonal rule in the basis U_A ⊗ U_G."""

    rotated: DiagonalAction
    input_basis: Tensor
    output_basis: Tensor

    @staticmethod
    def of(outers: Outers, input_basis: Tensor, output_basis: Tensor, var: Tensor) -> RotatedAction:
        """Rotate outer products into the basis where `var` (out, in) are variances."""
        deltas, inputs = outers.deltas @ output_basis, outers.inputs.in_basis(input_basis)
        diagonal = DiagonalAction((Outers(deltas, inputs, outers.weight),), var)
        return RotatedAction(diagonal, input_basis, output_basis)

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Rotate, apply the diagonal rule, rotate back."""
        known = self.rotated.terms[0].inputs
        rotated = known if known.id == inputs.id else inputs.in_basis(self.input_basis)
        return self.rotated(rotated) @ self.output_basis.T

    def combined(self, weights: Tensor) -> RotatedAction:
        """Combine in the rotated basis."""
        return replace(self, rotated=self.rotated.combined(weights))

    def blended(self, other: RotatedAction, kept: Weight, new: Weight) -> RotatedAction:
        """Join the terms in the rotated basis."""
        return replace(self, rotated=self.rotated.blended(other.rotated, kept, new))


@final
@dataclass(frozen=True, eq=False)
class LowRankAction(Action):
    """The diagonal rule plus shared directions: Σ_k c_k F_k a'."""

    diagonal: DiagonalAction
    directions: Tensor  # F (r, out, in)
    coefficients: Tensor  # c = Fᵀv over all layers, (*batch, r)

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Add both parts."""
        moved = torch.einsum("...pi,koi->...pko", inputs.vectors, self.directions)
        return self.diagonal(inputs) + (moved * self.coefficients[..., None, :, None]).sum(-2)

    def combined(self, weights: Tensor) -> LowRankAction:
        """Combine both parts."""
        diagonal = self.diagonal.combined(weights)
        return replace(self, diagonal=diagonal, coefficients=mix(weights, self.coefficients))

    def blended(self, other: LowRankAction, kept: Weight, new: Weight) -> LowRankAction:
        """Blend both parts."""
        diagonal = self.diagonal.blended(other.diagonal, kept, new)
        coefficients = _blend(self.coefficients, other.coefficients, kept, new)
        return replace(self, diagonal=diagonal, coefficients=coefficients)


def diagonal_products(terms: int, positions: int) -> int:
    """Count the products of δaᵀ ⊙ S with vectors: one per pair, or written out tile by tile."""
    return min(terms * positions, terms + positions + TILING)


def diagonal_prefers_factors(terms: int, positions: int, out_size: int) -> bool:
    """Compare the cost of v in factors with that of a v that is written out and kept.

    Where a layer has more positions than outputs, its unfolded inputs are larger than v.
    """
    in_factors = diagonal_products(terms, positions) if positions < out_size else terms * positions
    return in_factors <= 2 * positions + KEEPING


def _blend(mine: Tensor, its: Tensor, kept: Weight, new: Weight) -> Tensor:
    if isinstance(kept, Tensor) and isinstance(new, Tensor):
        return (by_row(kept, mine) * mine).addcmul_(by_row(new, its), its)
    assert not isinstance(new, Tensor)
    return (kept * mine).add_(its, alpha=new)


def _combined(terms: Terms, weights: Tensor) -> Terms:
    return tuple(one.combined(weights) for one in terms)


def _blended(mine: Terms, its: Terms, kept: Weight, new: Weight) -> Terms:
    """Return kept · mine + new · its; two single terms with the same inputs become one."""
    faded = tuple(one.scaled(kept) for one in mine)
    added = tuple(one.scaled(new) for one in its)
    if len(faded) == len(added) == 1 and faded[0].inputs.id == added[0].inputs.id:
        return (faded[0].merged(added[0]),)
    return faded + added


# The rules ---------------------------------------------------------------------------------------


@final
class _PairRule(torch.autograd.Function):
    """Σ_t δ_t ⊙ S(a_t ⊙ a'), with one product for every pair of term and position."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms, var: Tensor) -> Tensor:
        ctx.terms, ctx.var, ctx.shape = terms, var, inputs.shape
        width = var.shape[1]
        inputs = inputs[..., :width]
        added = None
        for weight, delta, a in _one_by_one(terms):
            added = _added(added, (a[..., :width] * inputs) @ var.T, delta, weight)
        assert added is not None
        return added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pull back to the inputs: Σ_t a_t ⊙ Sᵀ(δ_t ⊙ g)."""
        width, added = ctx.var.shape[1], None
        for weight, delta, a in _one_by_one(ctx.terms):
            added = _added(added, (delta * grad) @ ctx.var, a[..., :width], weight)
        assert added is not None
        whole = functional.pad(added, (0, ctx.shape[-1] - width))
        return whole.sum_to_size(ctx.shape), None, None


@final
class _TiledRule(torch.autograd.Function):
    """The same for many pairs: Σ_t δ_t a_tᵀ ⊙ S, written out tile by tile."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms, var: Tensor) -> Tensor:
        ctx.terms, ctx.var, ctx.shape = terms, var, inputs.shape
        deltas, vectors = _joined(terms)
        batch = torch.broadcast_shapes(deltas.shape[:-2], inputs.shape[:-2])
        added = inputs.new_zeros(*batch, inputs.shape[-2], len(var))
        groups = (_groups(each, batch) for each in (added, deltas, vectors, inputs))
        for into, delta, a, own in zip(*groups, strict=True):
            for features, matrix in _tiles(delta, a, var):
                into.baddbmm_(own[..., features].expand(len(into), -1, -1), matrix.mT)
        return added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pull back to the inputs."""
        batch = grad.shape[:-2]
        pulled = grad.new_zeros(*batch, *ctx.shape[-2:])
        groups = (_groups(each, batch) for each in (pulled, *_joined(ctx.terms), grad))
        for into, delta, a, own in zip(*groups, strict=True):
            for features, matrix in _tiles(delta, a, ctx.var):
                into[..., features] = own @ matrix
        return pulled.sum_to_size(ctx.shape), None, None


def _joined(terms: Terms) -> tuple[Tensor, Tensor]:
    """Return the δ and a of all terms as one, with the weights in the δ."""
    deltas = [one.weight * one.deltas for one in terms]
    vectors = [one.inputs.vectors for one in terms]
    if len(terms) == 1:
        return deltas[0], vectors[0]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in vectors))
    vectors = [each.expand(*batch, *each.shape[-2:]) for each in vectors]
    return torch.cat(deltas, dim=-2), torch.cat(vectors, dim=-2)


def _groups(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Turn (*batch, ...) into (inputs, labels or 1, ...): the last batch dimension are labels."""
    if not batch:
        return tensor[None, None]
    return tensor.expand(*batch[:-1], *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def _tiles(deltas: Tensor, vectors: Tensor, var: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield Σ_t δ_t a_tᵀ ⊙ S for some input features at a time: (labels, out, features).

    The δ (labels, t, out) and a (labels or 1, t, in) are those of one input.
    """
    labels, shared, (out_size, in_size) = len(deltas), len(vectors) == 1, var.shape
    columns = deltas.mT.contiguous()
    width = max(1, TILE // (labels * out_size))
    for start in range(0, in_size, width):
        features = slice(start, min(start + width, in_size))
        a = vectors[..., features]
        # Labels that share the a take one matrix product.
        rows = (columns.flatten(0, 1) @ a[0]).unflatten(0, (labels, -1)) if shared else columns @ a
        yield features, rows.mul_(var[:, features])


def _added(total: Tensor | None, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Return total + weight · x ⊙ y, in place because these tensors are large."""
    return (x * y).mul_(weight) if total is None else total.addcmul_(x, y, value=weight)


def _one_by_one(terms: Terms) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield every single δ and a with its weight, each (*batch, 1, features)."""
    for one in terms:
        vectors = one.inputs.vectors.split(1, -2)
        for delta, a in zip(one.deltas.split(1, -2), vectors, strict=True):
            yield one.weight, delta, a


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Add up tensors in place; the first one must be owned by the caller."""
    return reduce(Tensor.add_, parts)
