"""Kronecker: one Kronecker-factored block per affine layer, as from KFAC-Laplace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._algebra.actions import Action, Displacement
from acnml._algebra.dual import Affine, Dual
from acnml._algebra.kernels import Kernel
from acnml._util import checks
from acnml._util.params import Params, add, normal_like, subtract
from acnml.posteriors.base import Posterior
from acnml.posteriors.blocks import Block


@final
@dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Posterior):
    """N(μ, Σ) with Σ block-diagonal over layers, weight and bias of a layer together in a block.

    Args:
        mean: μ.
        blocks: a `FactorBlock` or `EigenBlock` for every layer; their parameters are the mean's.
    """

    mean: Params
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        checks.require_mean(self.mean)
        names = [name for block in self.blocks for name in block.layer.names]
        checks.require_same_names(names, self.mean, "the blocks", "mean")
        for block in self.blocks:
            shape = block.layer.join(self.mean, self.mean).shape
            if shape != block.shape:
                raise ValueError(
                    f"the block of {block.layer.weight!r} is for a matrix of shape {block.shape}, "
                    f"but its parameters form {tuple(shape)}"
                )

    def cov_mv(self, v: Params) -> Params:
        """Return Σv, block by block."""
        return self._named([block.cov_mv(block.layer.join(v, self.mean)) for block in self.blocks])

    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw μ + Σ^½ ε with ε ~ N(0, I)."""
        means = [block.layer.join(self.mean, self.mean) for block in self.blocks]
        noise = [normal_like(matrix, n, generator) for matrix in means]
        draws = [block.colour(e) for block, e in zip(self.blocks, noise, strict=True)]
        return add(self._named(draws), self.mean)

    def log_prob(self, params: Params) -> Tensor:
        """Return the sum of the blocks' Gaussian log-densities."""
        offset = subtract(params, self.mean)
        return torch.stack([self._block_log_prob(block, offset) for block in self.blocks]).sum(0)

    def scaled(self, alpha: float) -> Kronecker:
        """Return N(μ, αΣ)."""
        checks.require_positive(alpha, "alpha")
        return Kronecker(self.mean, tuple(block.scaled(alpha) for block in self.blocks))

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Kernel:
        """Ask the layer's block."""
        return self._block(layer).output_kernel(inputs)

    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Ask the layer's block."""
        return self._block(layer).prefers_factors(terms, positions)

    def displacement(self, dual: Dual) -> Displacement:
        """Let the factored layers' blocks act on inputs; multiply the others out."""
        dense: Params = {}
        actions: dict[Affine, Action] = {}
        for block in self.blocks:
            if block.layer in dual.outers:
                actions[block.layer] = block.action(dual.outers[block.layer])
            elif block.layer.weight in dual.dense:
                moved = block.cov_mv(block.layer.join(dual.dense, self.mean))
                dense.update(block.layer.split(moved, self.mean))
        return Displacement(dense, actions)

    def _block(self, layer: Affine) -> Block:
        return next(block for block in self.blocks if block.layer == layer)

    def _block_log_prob(self, block: Block, offset: Params) -> Tensor:
        distance = block.distance(block.layer.join(offset, self.mean))
        size = math.prod(block.shape)
        return -0.5 * (distance + block.log_det() + size * math.log(2 * math.pi))

    def _named(self, matrices: list[Tensor]) -> Params:
        """Split one matrix per block into named tensors, in the order of the mean."""
        named: Params = {}
        for block, matrix in zip(self.blocks, matrices, strict=True):
            named.update(block.layer.split(matrix, self.mean))
        return {name: named[name] for name in self.mean}
