"""What a posterior answers the fast solvers that has no faster form: write v out, multiply by Σ."""

from __future__ import annotations

import torch
from torch import Tensor

from acnml._algebra.actions import Displacement, MatrixAction
from acnml._algebra.dual import Affine, Dual, Outers
from acnml._algebra.kernels import DenseKernel
from acnml.posteriors.base import Posterior


def materialised_displacement(posterior: Posterior, dual: Dual) -> Displacement:
    """Return Σv through `cov_mv`: right for every posterior, one matrix per row and layer."""
    moved = posterior.cov_mv(dual.materialised(posterior.mean))
    return Displacement(
        {name: moved[name] for name in dual.dense},
        {layer: MatrixAction(layer.join(moved, posterior.mean)) for layer in dual.outers},
    )


def materialised_output_kernel(posterior: Posterior, layer: Affine, inputs: Tensor) -> DenseKernel:
    """Return the covariance of the outputs of the one layer that a posterior covers.

    The gradients of output c are the outer product e_c aᵀ, and the covariances e_cᵀ(Σ e_c'aᵀ)a.
    """
    out_size = layer.join(posterior.mean, posterior.mean).shape[-2]
    classes = torch.eye(out_size, dtype=inputs.dtype, device=inputs.device)[None, :, None]
    dual = Dual({}, {layer: Outers(classes, inputs[:, None, None])})
    action = materialised_displacement(posterior, dual).actions[layer]
    return DenseKernel(action(inputs[:, None, None]).squeeze(-2))
