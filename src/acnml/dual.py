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

from acnml.params import Params

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
    inputs: Tensor  # (*batch, terms, in [+ 1])

    def dense(self) -> Tensor:
        """Write the sum out as matrices (*batch, out, in [+ 1])."""
        return self.deltas.transpose(-1, -2) @ self.inputs


class Dual(NamedTuple):
    """A point v of the dual space, θ = μ + Σv: factored for some layers, dense for the rest."""

    dense: Params
    outers: Mapping[Affine, Outers]

    def materialised(self, like: Params) -> Params:
        """Write all of v out as named tensors."""
        factored = [layer.split(outers.dense(), like) for layer, outers in self.outers.items()]
        return {name: v for part in (self.dense, *factored) for name, v in part.items()}


class Displacement(NamedTuple):
    """Σv for a dual point v: tensors where v was dense, actions on inputs where it was factored."""

    dense: Params
    actions: Mapping[Affine, Action]


def matrix_action(matrix: Tensor) -> Action:
    """Let a written-out displacement (*batch, out, in) act on inputs."""
    return lambda inputs: inputs @ matrix.transpose(-1, -2)


def diagonal_action(outers: Outers, var: Tensor) -> Action:
    """Let Σv act for independent weights with variances S (out, in): Σ_t δ_t ⊙ S(a_t ⊙ a')."""

    def action(inputs: Tensor) -> Tensor:
        products = outers.inputs.unsqueeze(-2) * inputs.unsqueeze(-3)  # (*batch, t, positions, in)
        return (outers.deltas.unsqueeze(-2) * (products @ var.T)).sum(-3)

    return action
