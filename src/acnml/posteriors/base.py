"""Posterior: a Gaussian over some of a model's parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from acnml._algebra.actions import Displacement, MatrixAction
from acnml._algebra.dual import Affine, Dual, LayerInputs, Outers
from acnml._algebra.kernels import DenseKernel, Kernel
from acnml._util.params import Params, count, map_tensors

if TYPE_CHECKING:
    from typing_extensions import Self


class Posterior(ABC):
    """q(θ) = N(μ, Σ) over the parameters named in `mean`; all others of the model stay frozen.

    A posterior is Gaussian algebra: it knows no model and no data. Its subclasses are frozen
    dataclasses whose fields are the whole state, so that they can be stored and moved as they are.
    Parameters that are passed in may carry leading batch dimensions.

    A subclass needs four methods: `cov_mv`, `sample`, `log_prob` and `scaled`. The fast solvers
    also ask for `displacement`, `output_kernel` and `prefers_factors`. Their defaults are correct
    for every posterior; override them where the covariance has a structure to exploit.
    """

    mean: Params

    @property
    def dtype(self) -> torch.dtype:
        """The floating point type of its algebra. The model's own type may be narrower."""
        return next(iter(self.mean.values())).dtype

    @abstractmethod
    def cov_mv(self, v: Params) -> Params:
        """Return Σv."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw n points, with a leading dimension n."""

    @abstractmethod
    def log_prob(self, params: Params) -> Tensor:
        """Return log q(θ), one number per leading batch index."""

    @abstractmethod
    def scaled(self, alpha: float) -> Self:
        """Return N(μ, αΣ). ACNML's weight α of the query is implemented by this scale."""

    def displacement(self, dual: Dual) -> Displacement:
        """Return Σv for a v that is partly in factors.

        The default writes v out and multiplies by Σ: one matrix per row and layer.
        """
        moved = self.cov_mv(dual.materialised(self.mean))
        return Displacement(
            {name: moved[name] for name in dual.dense},
            {layer: MatrixAction(layer.join(moved, self.mean)) for layer in dual.outers},
        )

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Kernel:
        """Return the covariance of the outputs of the only covered layer at inputs (B, in [+ 1]).

        The default: the gradient of output c is the outer product e_c aᵀ, and the covariance of
        outputs c and c' is e_cᵀ(Σ e_c'aᵀ)a.
        """
        out_size = layer.join(self.mean, self.mean).shape[-2]
        classes = torch.eye(out_size, dtype=inputs.dtype, device=inputs.device)[None, :, None]
        own = LayerInputs.new(inputs[:, None, None])
        action = self.displacement(Dual({}, {layer: Outers(classes, own)})).actions[layer]
        return DenseKernel(action(own).squeeze(-2))

    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Whether Σv acts on `positions` inputs faster with v as `terms` outer products.

        The alternative is to write Σv out, one matrix for every row. That is the default.
        """
        return False

    @final
    @torch.inference_mode(False)
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move to a device and floating point type."""
        # Tensors made in inference mode cannot take part in gradients; their clones can.
        return map_tensors(self, lambda t: (t.clone() if t.is_inference() else t).to(device, dtype))

    def __repr__(self) -> str:
        names = list(self.mean)
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"{type(self).__name__}({count(self.mean):,} parameters: {span})"
