"""What Σv adds to the outputs of affine layers, for a v in factors: never written out.

For one outer product, v = δaᵀ, and a layer input a' the displacement adds

    diagonal, variances S       δ ⊙ S(a ⊙ a')
    Kronecker A⁻¹ ⊗ G⁻¹         G⁻¹δ ⟨A⁻¹a, a'⟩
    Kronecker in an eigenbasis  the diagonal rule between two rotations

Tensors are as in `acnml.dual`: factors (*batch, terms, features), inputs (*batch, positions, in).
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

from acnml.dual import Affine, Outers, diagonal_products, mix
from acnml.params import Params

if TYPE_CHECKING:
    from typing_extensions import Self


class Action(ABC):
    """A displacement Σv of one layer, acting on its inputs. It is linear in v."""

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor:
        """Map inputs (*batch, positions, in [+ 1]) to what is added: (*batch, positions, out)."""

    @abstractmethod
    def combined(self, weights: Tensor) -> Self:
        """Return the action of Σ_c w_c v_c, see `Dual.combined`."""

    @abstractmethod
    def blended(self, other: Self, kept: float, new: float) -> Self:
        """Return the action of kept · v + new · v', where `other` is that of v'."""


class Displacement(NamedTuple):
    """Σv for a dual point v: tensors where v was dense, actions on inputs where it was factored."""

    dense: Params
    actions: Mapping[Affine, Action]

    def combined(self, weights: Tensor) -> Displacement:
        """Return Σ applied to Σ_c w_c v_c, see `Dual.combined`."""
        dense = {name: mix(weights, moved) for name, moved in self.dense.items()}
        return Displacement(dense, {k: a.combined(weights) for k, a in self.actions.items()})

    def blended(self, other: Displacement, kept: float, new: float) -> Displacement:
        """Return kept · Σv + new · Σv', where `other` is Σv', whose tensors are used up."""
        # In place: what is written out for every row is the largest thing in memory.
        for name, moved in other.dense.items():
            moved.mul_(new).add_(self.dense[name], alpha=kept)
        return Displacement(
            other.dense,
            {k: a.blended(other.actions[k], kept, new) for k, a in self.actions.items()},
        )


@final
@dataclass(frozen=True, eq=False)
class MatrixAction(Action):
    """A displacement that is written out: matrices (*batch, out, in)."""

    matrix: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """Multiply."""
        return inputs @ self.matrix.transpose(-1, -2)

    def combined(self, weights: Tensor) -> MatrixAction:
        """Combine the matrices."""
        return MatrixAction(mix(weights, self.matrix))

    def blended(self, other: MatrixAction, kept: float, new: float) -> MatrixAction:
        """Blend the matrices."""
        return MatrixAction(kept * self.matrix + new * other.matrix)


class Term(NamedTuple):
    """A weighted sum of outer products, Σ_t w δ_t a_tᵀ, in a posterior's own coordinates."""

    weight: float
    deltas: Tensor  # (*batch, terms, out)
    inputs: Tensor  # (*batch, terms, in)
    source: Tensor  # the layer's inputs that `inputs` were made from


Terms: TypeAlias = tuple[Term, ...]


def _combined(terms: Terms, weights: Tensor) -> Terms:
    """Combine the δ of every term; the inputs are shared."""
    return tuple(one._replace(deltas=mix(weights, one.deltas)) for one in terms)


def _blended(mine: Terms, its: Terms, kept: float, new: float) -> Terms:
    """Return kept · mine + new · its; terms of one and the same inputs tensor become one."""
    faded = tuple(one._replace(weight=one.weight * kept) for one in mine)
    added = tuple(one._replace(weight=one.weight * new) for one in its)
    if len(faded) == len(added) == 1 and faded[0].source is added[0].source:
        (a,), (b,) = faded, added
        deltas = torch.add(a.weight * a.deltas, b.deltas, alpha=b.weight)
        return (a._replace(weight=1.0, deltas=deltas),)
    return faded + added


@final
@dataclass(frozen=True, eq=False)
class KeyAction(Action):
    """Σ_t d_t ⟨k_t, a'⟩: two dot products a term, as for A⁻¹ ⊗ G⁻¹ with d = G⁻¹δ and k = A⁻¹a."""

    terms: Terms

    def __call__(self, inputs: Tensor) -> Tensor:
        """Weigh every d by how well its key fits the input."""
        return _KeyRule.apply(inputs, self.terms)

    def combined(self, weights: Tensor) -> KeyAction:
        """Combine the d."""
        return KeyAction(_combined(self.terms, weights))

    def blended(self, other: KeyAction, kept: float, new: float) -> KeyAction:
        """Join the terms."""
        return KeyAction(_blended(self.terms, other.terms, kept, new))


class _KeyRule(torch.autograd.Function):
    """Σ_t d_t ⟨k_t, a'⟩; its gradient needs nothing but the terms."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms) -> Tensor:
        ctx.terms, ctx.shape = terms, inputs.shape
        return _total((one.weight * (inputs @ one.inputs.mT)) @ one.deltas for one in terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Pull back to the inputs: Σ_t k_t ⟨d_t, g⟩."""
        pulled = _total((one.weight * (grad @ one.deltas.mT)) @ one.inputs for one in ctx.terms)
        return pulled.sum_to_size(ctx.shape), None


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors up, in place."""
    return reduce(Tensor.add_, parts)


@final
@dataclass(frozen=True, eq=False)
class DiagonalAction(Action):
    """Σ_t δ_t ⊙ S(a_t ⊙ a') for independent weights with variances S (out, in).

    A bias, whose 1 ends the inputs, has its variances apart: its share is the same for all inputs.
    """

    terms: Terms
    var: Tensor
    bias_var: Tensor | None = None
    # S(a ⊙ a) for the inputs a of the terms themselves. All that comes from this action shares it:
    # a first layer sees the same inputs at every step and asks only once.
    known: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(outers: Outers, var: Tensor, bias_var: Tensor | None = None) -> DiagonalAction:
        """Let outer products act as they are."""
        return DiagonalAction((Term(1.0, *outers, outers.inputs),), var, bias_var)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Multiply with S for every pair of term and position, or write Σv out bit by bit."""
        terms = sum(one.deltas.shape[-2] for one in self.terms)
        pairs, rows = terms * inputs.shape[-2], self.terms[0].deltas.shape[:-2].numel()
        products = diagonal_products(terms, inputs.shape[-2])
        own = len(self.terms) == 1 and inputs is self.terms[0].inputs
        if own and pairs * inputs.shape[:-2].numel() <= products * rows:
            return self._on_own_inputs()
        rule = _PairRule if pairs == products else _WrittenRule
        added: Tensor = rule.apply(inputs, self.terms, self.var)
        if self.bias_var is None:
            return added
        deltas = _total(one.weight * one.deltas.sum(-2, keepdim=True) for one in self.terms)
        return added + deltas * self.bias_var

    def combined(self, weights: Tensor) -> DiagonalAction:
        """Combine the δ."""
        return replace(self, terms=_combined(self.terms, weights))

    def blended(self, other: DiagonalAction, kept: float, new: float) -> DiagonalAction:
        """Join the terms."""
        return replace(self, terms=_blended(self.terms, other.terms, kept, new))

    def _on_own_inputs(self) -> Tensor:
        """Use S(a_t ⊙ a_p), for all pairs of terms and positions, again and again."""
        (term,) = self.terms
        if "own" not in self.known:
            a = term.inputs[..., : self.var.shape[1]]
            moved = (a.unsqueeze(-2) * a.unsqueeze(-3)) @ self.var.T  # (*batch, t, p, out)
            self.known["own"] = moved if self.bias_var is None else moved + self.bias_var
        return (term.weight * term.deltas.unsqueeze(-2) * self.known["own"]).sum(-3)


class _PairRule(torch.autograd.Function):
    """Σ_t δ_t ⊙ S(a_t ⊙ a'); its gradient needs nothing but the terms."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms, var: Tensor) -> Tensor:
        ctx.terms, ctx.var, ctx.shape = terms, var, inputs.shape
        width = var.shape[1]
        inputs = inputs[..., :width]
        total = None
        for weight, delta, a in _one_by_one(terms):
            total = _added(total, (a[..., :width] * inputs) @ var.T, delta, weight)
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pull back to the inputs: Σ_t a_t ⊙ Sᵀ(δ_t ⊙ g)."""
        width, total = ctx.var.shape[1], None
        for weight, delta, a in _one_by_one(ctx.terms):
            total = _added(total, (delta * grad) @ ctx.var, a[..., :width], weight)
        assert total is not None
        whole = functional.pad(total, (0, ctx.shape[-1] - width))
        return whole.sum_to_size(ctx.shape), None, None


class _WrittenRule(torch.autograd.Function):
    """The same, for many pairs: Σ_t δ_t a_tᵀ ⊙ S, written out for some outputs at a time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms, var: Tensor) -> Tensor:
        ctx.terms, ctx.var, ctx.shape = terms, var, inputs.shape
        inputs = inputs[..., : var.shape[1]]
        parts = [_applied(matrix, inputs) for _, matrix in _bit_by_bit(terms, var)]
        return torch.cat(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pull back to the inputs."""
        written = _bit_by_bit(ctx.terms, ctx.var)
        total = _total(grad[..., some] @ matrix for some, matrix in written)
        whole = functional.pad(total, (0, ctx.shape[-1] - ctx.var.shape[1]))
        return whole.sum_to_size(ctx.shape), None, None


# Numbers of a row's bit: it is to fit into a core's second-level cache.
BIT = 2**17


def _bit_by_bit(terms: Terms, var: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield Σ_t δ_t a_tᵀ ⊙ S, some outputs at a time: (*batch, some, in)."""
    out_size, width = var.shape
    for start in range(0, out_size, max(1, BIT // width)):
        some = slice(start, start + max(1, BIT // width))
        parts = (
            _products(one.weight * one.deltas[..., some], one.inputs[..., :width]) for one in terms
        )
        yield some, _total(parts).mul_(var[some])


def _products(deltas: Tensor, inputs: Tensor) -> Tensor:
    """Return Σ_t δ_t a_tᵀ for every row; one matrix product serves rows that share their inputs."""
    if _each_its_own(inputs):
        return deltas.mT @ inputs
    rows = deltas.mT.flatten(-3, -2) @ inputs.squeeze(-3)
    return rows.unflatten(-2, (deltas.shape[-3], -1))


def _applied(matrix: Tensor, inputs: Tensor) -> Tensor:
    """Multiply every row's inputs (*batch, positions, in) with its matrix (*batch, some, in)."""
    if _each_its_own(inputs):
        return inputs @ matrix.mT
    rows = inputs.squeeze(-3) @ matrix.flatten(-3, -2).mT
    return rows.unflatten(-1, (matrix.shape[-3], -1)).transpose(-3, -2)


def _each_its_own(inputs: Tensor) -> bool:
    return inputs.ndim < 3 or inputs.shape[-3] > 1


def _added(total: Tensor | None, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Return total + weight · x ⊙ y, in place: these tensors are large."""
    return (x * y).mul_(weight) if total is None else total.addcmul_(x, y, value=weight)


def _one_by_one(terms: Terms) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield every single δ and a with its weight, each (*batch, 1, features)."""
    for one in terms:
        for delta, a in zip(one.deltas.split(1, -2), one.inputs.split(1, -2), strict=True):
            yield one.weight, delta, a


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
        deltas, inputs = outers.deltas @ output_basis, outers.inputs @ input_basis
        diagonal = DiagonalAction((Term(1.0, deltas, inputs, outers.inputs),), var)
        return RotatedAction(diagonal, input_basis, output_basis)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Rotate, apply the diagonal rule, rotate back."""
        first = self.rotated.terms[0]
        known = inputs is first.source  # then its rotation is, and what S makes of it
        rotated = first.inputs if known else inputs @ self.input_basis
        return self.rotated(rotated) @ self.output_basis.T

    def combined(self, weights: Tensor) -> RotatedAction:
        """Combine in the rotated basis."""
        return replace(self, rotated=self.rotated.combined(weights))

    def blended(self, other: RotatedAction, kept: float, new: float) -> RotatedAction:
        """Join the terms in the rotated basis."""
        return replace(self, rotated=self.rotated.blended(other.rotated, kept, new))


@final
@dataclass(frozen=True, eq=False)
class LowRankAction(Action):
    """The diagonal rule plus shared directions: Σ_k c_k F_k a'."""

    diagonal: DiagonalAction
    directions: Tensor  # F (r, out, in)
    coefficients: Tensor  # c = Fᵀv over all layers, (*batch, r)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Add both parts."""
        moved = torch.einsum("...pi,koi->...pko", inputs, self.directions)
        return self.diagonal(inputs) + (moved * self.coefficients[..., None, :, None]).sum(-2)

    def combined(self, weights: Tensor) -> LowRankAction:
        """Combine both parts."""
        diagonal = self.diagonal.combined(weights)
        return replace(self, diagonal=diagonal, coefficients=mix(weights, self.coefficients))

    def blended(self, other: LowRankAction, kept: float, new: float) -> LowRankAction:
        """Blend both parts."""
        diagonal = self.diagonal.blended(other.diagonal, kept, new)
        coefficients = kept * self.coefficients + new * other.coefficients
        return replace(self, diagonal=diagonal, coefficients=coefficients)
