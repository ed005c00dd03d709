"""Kronecker: one Kronecker-factored block per affine layer, e.g. from a KFAC Laplace fit.

A block is the covariance of one layer's matrix [W b]. It starts from a precision A ⊗ G, where A
(in×in) is the second moment of the layer's inputs and G (out×out) that of the gradients at its
outputs, scaled so that A ⊗ G is a sum over the whole training set. A prior precision τ is added to
the product, or √τ to each factor ("damping"). Either way, the eigenvectors of A and G stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from acnml._algebra.dual import (
    Action,
    Affine,
    Displacement,
    Dual,
    Outers,
    diagonal_action,
    diagonal_gram,
    gram,
    pairs_are_cheap,
)
from acnml._util import checks
from acnml._util.params import Params, add, normal_like, subtract
from acnml._util.torch_state import threads_for
from acnml.posteriors.base import Posterior, gaussian_log_density, require_mean


@final
@dataclass(frozen=True, eq=False)
class EigenBlock:
    """The covariance Σ = U diag(S) Uᵀ of the matrix [W b] of an affine layer, with U = U_A ⊗ U_G.

    The entries are independent in this basis. Matrices have the shape ([groups,] out, in): the
    groups of a grouped convolution are independent of each other.

    >>> layer = acnml.posteriors.Affine("weight", "bias")
    >>> block = acnml.posteriors.EigenBlock(layer, torch.eye(5), torch.eye(3), torch.ones(3, 5))
    >>> mean = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    >>> acnml.Kronecker(mean, (block,))
    Kronecker(15 parameters: weight … bias)
    """

    layer: Affine
    input_basis: Tensor  # U_A (in, in), orthogonal
    output_basis: Tensor  # U_G (out, out), orthogonal
    var: Tensor  # S (out, in)

    def __post_init__(self) -> None:
        what, shape = f"var of {self.layer.weight!r}", tuple(self.var.shape)
        if shape != self.shape:
            raise ValueError(f"{what} has shape {shape}, expected {self.shape}")
        if not (torch.isfinite(self.var) & (self.var >= 0)).all():
            raise ValueError(f"{what} must be finite and not negative")

    @staticmethod
    def from_factors(layer: Affine, A: Tensor, G: Tensor, prior_precision: float) -> EigenBlock:
        """Return (A ⊗ G + τI)⁻¹ exactly."""
        checks.require_positive(prior_precision, "prior_precision")
        (a, U_A), (g, U_G) = eigh(A), eigh(G)
        return EigenBlock(layer, U_A, U_G, 1 / (_products(g, a) + prior_precision))

    @staticmethod
    def damped(layer: Affine, A: Tensor, G: Tensor, prior_precision: float) -> EigenBlock:
        """Return (A + √τ I)⁻¹ ⊗ (G + √τ I)⁻¹, as Ritter et al. (2018) and the ACNML paper do."""
        root = math.sqrt(checks.require_positive(prior_precision, "prior_precision"))
        (a, U_A), (g, U_G) = eigh(A), eigh(G)
        return EigenBlock(layer, U_A, U_G, 1 / _products(g + root, a + root))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape ([groups,] out, in) of the matrices."""
        return (*self.output_basis.shape[:-1], self.input_basis.shape[-1])

    def cov_mv(self, matrix: Tensor) -> Tensor:
        """Return U_G (S ⊙ U_Gᵀ V U_A) U_Aᵀ for matrices V (*batch, out, in)."""
        return self.rotated_back(self.var * self.rotated(matrix))

    def rotated(self, matrix: Tensor) -> Tensor:
        """Return U_Gᵀ V U_A."""
        return self.output_basis.mT @ matrix @ self.input_basis

    def rotated_back(self, matrix: Tensor) -> Tensor:
        """Return U_G V U_Aᵀ."""
        return self.output_basis @ matrix @ self.input_basis.mT

    def action(self, outers: Outers) -> Action:
        """Return the rule for independent weights between two rotations."""
        diagonal = diagonal_action(self.rotated_outers(outers), self.var)
        return lambda x: diagonal(x @ self.input_basis) @ self.output_basis.T

    def rotated_outers(self, outers: Outers) -> Outers:
        """Return U_Gᵀ V U_A for a V that is a sum of outer products."""
        return Outers(outers.deltas @ self.output_basis, outers.inputs @ self.input_basis)

    def covariance(self, jacobian: Dual, mean: Params) -> Tensor:
        """Return JΣJᵀ (B, C, C) for gradients (B, C, ...), in the basis where Σ is diagonal."""
        if self.layer not in jacobian.outers:
            return self._gram(self.layer.join(jacobian.dense, mean))
        own, (out_size, in_size) = jacobian.outers[self.layer], self.shape
        count, terms, _ = own.deltas.shape[1:]
        of_factors = terms * (in_size**2 + count * out_size**2)
        if of_factors <= count * out_size * in_size * (out_size + in_size):
            return diagonal_gram(self.rotated_outers(own), self.var)
        return self._gram(own.dense())

    def _gram(self, matrices: Tensor) -> Tensor:
        return gram(self.var.sqrt() * self.rotated(matrices))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Posterior):
    """N(μ, Σ) with one block of Σ per layer, for its weight and bias together.

    Args:
        mean: μ.
        blocks: one for every layer. Together they must name exactly the parameters in `mean`.

    >>> posterior
    Kronecker(15 parameters: weight … bias)
    >>> posterior.sample(7, torch.Generator().manual_seed(0))["weight"].shape
    torch.Size([7, 3, 4])
    """

    mean: Params
    blocks: tuple[EigenBlock, ...]
    couples_layers = False

    def __post_init__(self) -> None:
        require_mean(self.mean)
        names = [name for block in self.blocks for name in block.layer.names]
        checks.require_same_names(names, self.mean, "the blocks", "mean")
        for block in self.blocks:
            shape = block.layer.join(self.mean, self.mean).shape
            if shape != block.shape:
                raise ValueError(
                    f"the block of {block.layer.weight!r} is for a matrix of shape {block.shape}, "
                    f"but its parameters in the mean have shape {tuple(shape)}"
                )

    def cov_mv(self, v: Params) -> Params:
        """Return Σv, block by block."""
        return self._named([block.cov_mv(block.layer.join(v, self.mean)) for block in self.blocks])

    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw μ + U_G (√S ⊙ ε) U_Aᵀ with ε ~ N(0, I), block by block."""
        noise = [normal_like(block.var, n, generator) for block in self.blocks]
        draws = [b.rotated_back(b.var.sqrt() * e) for b, e in zip(self.blocks, noise, strict=True)]
        return add(self._named(draws), self.mean)

    def log_prob(self, params: Params) -> Tensor:
        """Return the log-density, with dᵀΣ⁻¹d = Σ (U_Gᵀ d U_A)² / S and |Σ| = Π S."""
        offset, parts = subtract(params, self.mean), []
        for block in self.blocks:
            rotated = block.rotated(block.layer.join(offset, self.mean))
            distance = (rotated**2 / block.var).flatten(-len(block.shape)).sum(-1)
            log_det = block.var.log().sum()
            parts.append(gaussian_log_density(distance, log_det, block.var.numel()))
        return torch.stack(parts).sum(0)

    def scaled(self, alpha: float) -> Kronecker:
        """Return N(μ, αΣ)."""
        checks.require_positive(alpha, "alpha")
        return Kronecker(self.mean, tuple(replace(b, var=b.var * alpha) for b in self.blocks))

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Tensor:
        """Return U_G diag(S (U_Aᵀa)²) U_Gᵀ."""
        block = self._block(layer)
        var = (inputs @ block.input_basis) ** 2 @ block.var.T
        return (block.output_basis * var.unsqueeze(1)) @ block.output_basis.T

    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Compare the diagonal rule with four rotations of a matrix for every row."""
        *_, out_size, in_size = self._block(layer).shape
        written_out = terms + positions <= 2 * (out_size + in_size)
        return written_out or pairs_are_cheap(terms, positions)

    def covariance(self, jacobian: Dual) -> Tensor:
        """Return JΣJᵀ, summed over blocks."""
        known = {*jacobian.dense, *(layer.weight for layer in jacobian.outers)}
        own = [block for block in self.blocks if block.layer.weight in known]
        return torch.stack([block.covariance(jacobian, self.mean) for block in own]).sum(0)

    def displacement(self, dual: Dual) -> Displacement:
        """Return Σv: as `Diagonal.displacement` in the rotated basis, in full where v is."""
        dense: Params = {}
        actions: dict[Affine, Action] = {}
        for b in self.blocks:
            if b.layer in dual.outers:
                actions[b.layer] = b.action(dual.outers[b.layer])
            elif b.layer.weight in dual.dense:
                moved = b.cov_mv(b.layer.join(dual.dense, self.mean))
                dense.update(b.layer.split(moved, self.mean))
        return Displacement(dense, actions)

    def _block(self, layer: Affine) -> EigenBlock:
        return next(block for block in self.blocks if block.layer == layer)

    def _named(self, matrices: list[Tensor]) -> Params:
        """Split one matrix per block into named tensors, in the order of the mean."""
        named: Params = {}
        for block, matrix in zip(self.blocks, matrices, strict=True):
            named.update(block.layer.split(matrix, self.mean))
        return {name: named[name] for name in self.mean}


def _products(g: Tensor, a: Tensor) -> Tensor:
    """Return all products ([groups,] out, in) of eigenvalues of G and A."""
    return g.unsqueeze(-1) * a.unsqueeze(-2)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, with negative rounding errors set to 0, and the eigenvectors."""
    with threads_for(matrix.numel() * matrix.shape[-1]):
        values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp(min=0).to(matrix.dtype), vectors.to(matrix.dtype).contiguous()
