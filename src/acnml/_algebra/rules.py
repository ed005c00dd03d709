"""Sums of outer products acting on a layer's inputs, differentiably and without writing them out.

A rule is a function of the inputs whose gradient needs nothing but the terms: autograd would keep
every intermediate result of every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class Term(NamedTuple):
    """A weighted sum of outer products, Σ_t w δ_t a_tᵀ, in a posterior's own coordinates."""

    weight: float
    deltas: Tensor  # (*batch, terms, out)
    inputs: Tensor  # (*batch, terms, in)
    source: Tensor  # the layer's inputs that `inputs` were made from


Terms: TypeAlias = tuple[Term, ...]


@final
class KeyRule(torch.autograd.Function):
    """Σ_t d_t ⟨k_t, a'⟩; its gradient needs nothing but the terms."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms) -> Tensor:
        """Weigh every d by how well its key fits the input."""
        ctx.terms, ctx.shape = terms, inputs.shape
        return total((one.weight * (inputs @ one.inputs.mT)) @ one.deltas for one in terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Pull back to the inputs: Σ_t k_t ⟨d_t, g⟩."""
        pulled = total((one.weight * (grad @ one.deltas.mT)) @ one.inputs for one in ctx.terms)
        return pulled.sum_to_size(ctx.shape), None


@final
class PairRule(torch.autograd.Function):
    """Σ_t δ_t ⊙ S(a_t ⊙ a'); its gradient needs nothing but the terms."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms, var: Tensor) -> Tensor:
        """Multiply with S once for every single term."""
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
class WrittenRule(torch.autograd.Function):
    """The same, for many pairs: Σ_t δ_t a_tᵀ ⊙ S, written out for some outputs at a time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, terms: Terms, var: Tensor) -> Tensor:
        """Multiply with what is written out."""
        ctx.terms, ctx.var, ctx.shape = terms, var, inputs.shape
        inputs = inputs[..., : var.shape[1]]
        parts = [_applied(matrix, inputs) for _, matrix in _bit_by_bit(terms, var)]
        return torch.cat(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pull back to the inputs."""
        written = _bit_by_bit(ctx.terms, ctx.var)
        pulled = total(grad[..., some] @ matrix for some, matrix in written)
        whole = functional.pad(pulled, (0, ctx.shape[-1] - ctx.var.shape[1]))
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
        yield some, total(parts).mul_(var[some])


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


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors up, in place."""
    return reduce(Tensor.add_, parts)
