"""Scaling layers (normalisation with a weight and a bias) with weights of every row's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from acnml._engine.layers import normalised


def scale(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run a layer on every row x (R, ...) with its own weight and bias (R, *shape)."""
    bias = torch.zeros_like(weight) if bias is None else bias
    if isinstance(module, _BatchNorm):
        assert module.running_var is not None
        assert module.running_mean is not None
        # Activations are large, so they are passed once: the statistics join weight and bias.
        weight = weight * (module.running_var + module.eps).rsqrt()
        bias = bias - weight * module.running_mean
    else:
        x = normalised(module, x)
    weight, bias = (_broadcast(module, values, x.ndim) for values in (weight, bias))
    return torch.addcmul(bias, x, weight)


def _broadcast(module: nn.Module, values: Tensor, ndim: int) -> Tensor:
    """Shape a parameter (R, *shape) to act on tensors (R, ...)."""
    missing = ndim - values.ndim
    where = 1 if isinstance(module, nn.LayerNorm) else values.ndim
    return values.reshape(*values.shape[:where], *[1] * missing, *values.shape[where:])
