"""What Σv adds to the outputs of affine layers, for a v in factors: never written out.

For one outer product, v = δaᵀ, and a layer input a' the displacement adds

    diagonal, variances S       δ ⊙ S(a ⊙ a')
    Kronecker A⁻¹ ⊗ G⁻¹         G⁻¹δ ⟨A⁻¹a, a'⟩
    Kronecker in an eigenbasis  the diagonal rule between two rotations

Tensors are as in `dual.py`: factors (*batch, terms, features), inputs (*batch, positions, in).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine, Outers, diagonal_products, mix
from acnml._algebra.rules import KeyRule, PairRule, Term, Terms, WrittenRule, total
from acnml._util.params import Params

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
        return KeyRule.apply(inputs, self.terms)

    def combined(self, weights: Tensor) -> KeyAction:
        """Combine the d."""
        return KeyAction(_combined(self.terms, weights))

    def blended(self, other: KeyAction, kept: float, new: float) -> KeyAction:
        """Join the terms."""
        return KeyAction(_blended(self.terms, other.terms, kept, new))


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
        rule = PairRule if pairs == products else WrittenRule
        added: Tensor = rule.apply(inputs, self.terms, self.var)
        if self.bias_var is None:
            return added
        deltas = total(one.weight * one.deltas.sum(-2, keepdim=True) for one in self.terms)
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
