"""Posterior: a Gaussian over some of a model's parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from acnml._algebra.actions import Displacement
from acnml._algebra.dual import Affine, Dual
from acnml._algebra.kernels import Kernel
from acnml._util.params import Params, count, map_tensors

if TYPE_CHECKING:
    from typing_extensions import Self


class Posterior(ABC):
    """q(θ) = N(μ, Σ) over the parameters named in `mean`; all others of the model stay frozen.

    Pure Gaussian algebra: a posterior knows no model and no data. Its subclasses are frozen
    dataclasses whose fields are the whole state, so that they can be stored and moved as they are.
    Wherever parameters come in, they may carry leading batch dimensions.
    """

    mean: Params

    @property
    def dtype(self) -> torch.dtype:
        """The floating point type of its algebra; a model's own may be narrower."""
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
        """Return N(μ, αΣ): ACNML's weight α on the query is nothing but this."""

    @abstractmethod
    def displacement(self, dual: Dual) -> Displacement:
        """Return Σv for a v that is partly factored, without writing the factored parts out.

        The one hook of the fast solvers. A posterior without a faster form returns
        `materialised_displacement(self, dual)`.
        """

    @abstractmethod
    def output_kernel(self, layer: Affine, inputs: Tensor) -> Kernel:
        """Return the covariance of an affine layer's outputs at inputs (B, in [+ 1])."""

    @abstractmethod
    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Whether Σv, v of so many outer products, acts on so many positions faster in factors.

        The alternative is to write Σv out, one matrix for every row.
        """

    @final
    @torch.inference_mode(False)
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move to a device and floating point type."""
        # Tensors made in inference mode could not take part in gradients; their clones can.
        return map_tensors(self, lambda t: (t.clone() if t.is_inference() else t).to(device, dtype))

    def __repr__(self) -> str:
        names = list(self.mean)
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"{type(self).__name__}({count(self.mean):,} parameters: {span})"
