"""Posterior: a Gaussian over some of a model's parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from acnml._algebra.dual import (
    Affine,
    Displacement,
    Dual,
    Outers,
    matrix_action,
)
from acnml._util import checks
from acnml._util.params import Params, count, map_tensors

if TYPE_CHECKING:
    from typing_extensions import Self


class Posterior(ABC):
    """q(θ) = N(μ, Σ) over the parameters named in `mean`; all others of the model are fixed.

    A posterior holds only its mean and covariance, and is independent of any model and data.
    Subclasses are frozen dataclasses whose fields are their complete state, so that they can be
    stored and moved between devices. Methods accept parameters with leading batch dimensions.

    A subclass must implement `cov_mv`, `sample`, `log_prob` and `scaled`. The fast solvers also use
    `covariance`, `displacement`, `output_kernel` and `prefers_factors`. Their defaults are correct
    for every posterior. Override them if the structure of Σ allows a faster computation.

    Some methods take a vector v in parameter space as a `Dual`: for each affine layer, v is either
    a full tensor or a sum of outer products δaᵀ ("in factors"), where a is an input of the layer
    and δ a gradient at its output. The gradient of one example has this form.

    >>> isinstance(posterior, acnml.posteriors.Posterior)
    True
    >>> wide, narrow = posterior.scaled(10.0), posterior.scaled(0.1)
    >>> v = {name: torch.ones_like(tensor) for name, tensor in posterior.mean.items()}
    >>> torch.allclose(wide.cov_mv(v)["bias"], 100 * narrow.cov_mv(v)["bias"])
    True
    """

    mean: Params
    # Whether Σ has entries between different layers. If not, V = JΣJᵀ is a sum over layers.
    couples_layers: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        """The floating point type of the mean. The model may use a less precise type."""
        return next(iter(self.mean.values())).dtype

    @abstractmethod
    def cov_mv(self, v: Params) -> Params:
        """Return Σv."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Params:
        """Draw n samples, with a leading dimension n."""

    @abstractmethod
    def log_prob(self, params: Params) -> Tensor:
        """Return log q(θ), one number per leading batch index."""

    @abstractmethod
    def scaled(self, alpha: float) -> Self:
        """Return N(μ, αΣ). `Acnml` implements the weight α of the query by this scaling."""

    def displacement(self, dual: Dual) -> Displacement:
        """Return Σv for a v that may be in factors.

        The default expands v to full tensors and multiplies by Σ. This needs one matrix per layer
        for every row of the batch, i.e. for every pair of input and label.
        """
        moved = self.cov_mv(dual.materialised(self.mean))
        return Displacement(
            {name: moved[name] for name in dual.dense},
            {layer: matrix_action(layer.join(moved, self.mean)) for layer in dual.outers},
        )

    def covariance(self, jacobian: Dual) -> Tensor:
        """Return JΣJᵀ (B, C, C) for C gradients of each of B inputs.

        The layer inputs in the Jacobian are shared by these gradients: (B, 1, positions, in [+ 1]).
        """
        each = jacobian.materialised(self.mean)
        moved = self.cov_mv(each)
        parts = [v.flatten(2) @ moved[name].flatten(2).mT for name, v in each.items()]
        return torch.stack(parts).sum(0)

    def output_kernel(self, layer: Affine, inputs: Tensor) -> Tensor:
        """Return the covariance (B, out, out) of a layer's outputs at inputs (B, in [+ 1]).

        The layer must be the only one that the posterior covers. With a bias, the last entry of an
        input a is 1. The gradient of output c is e_c aᵀ, so the default computes the covariance of
        outputs c and c' as e_cᵀ(Σ e_c'aᵀ)a.
        """
        out_size = layer.join(self.mean, self.mean).shape[-2]
        classes = torch.eye(out_size, dtype=inputs.dtype, device=inputs.device)[None, :, None]
        own = inputs[:, None, None]
        action = self.displacement(Dual({}, {layer: Outers(classes, own)})).actions[layer]
        return action(own).squeeze(-2)

    def prefers_factors(self, layer: Affine, terms: int, positions: int) -> bool:
        """Return whether applying Σv to inputs is faster with v in factors.

        The alternative, which is the default, is to expand Σv to one matrix for every row.

        Args:
            layer: the affine layer.
            terms: number of outer products in v.
            positions: number of inputs per row, e.g. the output pixels of a convolution.
        """
        return False

    @final
    @torch.inference_mode(False)
    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Move to a device, convert to a floating point type, or both, as `Tensor.to` does."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        # Autograd cannot use tensors created in inference mode, but it can use their clones.
        return map_tensors(
            self, lambda t: (t.clone() if t.is_inference() else t).to(device=device, dtype=dtype)
        )

    def __repr__(self) -> str:
        names = list(self.mean)
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"{type(self).__name__}({count(self.mean):,} parameters: {span})"


def gaussian_log_density(distance: Tensor, log_det: Tensor, size: int) -> Tensor:
    """Return -½ (dᵀΣ⁻¹d + log |Σ| + P log 2π) for a distance dᵀΣ⁻¹d and P dimensions."""
    return -0.5 * (distance + log_det + size * math.log(2 * math.pi))


# Checks of fields --------------------------------------------------------------------------------


def require_mean(mean: Params) -> None:
    """Raise an error if a mean is empty or has entries that are not finite."""
    if not mean:
        raise ValueError("the mean is empty: a posterior needs at least one parameter")
    require_like_mean(mean, mean, "mean")


def require_variances(var: Params, mean: Params) -> None:
    """Raise an error unless variances fit the mean and are not negative."""
    require_mean(mean)
    require_like_mean(var, mean, "var")
    for name, tensor in var.items():
        if not (tensor >= 0).all():
            raise ValueError(f"var of {name!r} must not be negative")


def require_like_mean(given: Params, mean: Params, what: str, *lead: int) -> None:
    """Raise an error unless tensors are finite and have the mean's names and (*lead, *shape)."""
    checks.require_same_names(given, mean, what, "mean")
    for name, tensor in given.items():
        expected = (*lead, *mean[name].shape)
        if tensor.shape != expected:
            shape = tuple(tensor.shape)
            raise ValueError(f"{what} of {name!r} has shape {shape}, expected {expected}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{what} of {name!r} has NaN or infinite entries")


def require_density(var: Params) -> None:
    """Raise an error if a variance is zero, because the density does not exist then."""
    for name, tensor in var.items():
        if not (tensor > 0).all():
            raise ValueError(
                f"log_prob needs positive variances, but some of {name!r} are zero: leave fixed "
                "parameters out of the posterior"
            )
