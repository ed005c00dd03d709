"""Layers with weights of every row's own: running them, and gradients of their weights.

Rows become the groups of one grouped convolution, at the cost of a plain one; kernels too large for
the cache are faster as matrix products with unfolded patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from acnml._engine.recorder import Site, input_positions, normalised
from acnml._util.params import Params

# Convolution kernels with more weights than this are applied as matrix products.
LARGEST_GROUPED = 2**18


def forward_per_row(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run a convolution or scaling layer on rows x (R, ...), with weight and bias (R, *shape)."""
    if bias is None and isinstance(module.bias, Tensor):  # the layer has a bias that is not covered
        bias = module.bias.expand(len(weight), *module.bias.shape)
    if isinstance(module, nn.Conv2d):
        return _convolve(module, x, weight, bias)
    return _scale(module, x, weight, bias)


def _convolve(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, out_size = weight.shape[:2]
    padded, padding = _padded(module, x)
    if _is_large(module):
        output = weight.flatten(2) @ input_positions(module, x).mT
        output = output.unflatten(2, _output_shape(module, padded, padding))
    else:
        output = functional.conv2d(
            padded.flatten(0, 1).unsqueeze(0),
            weight.flatten(0, 1),
            None,
            module.stride,
            padding,
            module.dilation,
            rows * module.groups,
        ).unflatten(1, (rows, out_size))[0]
    return output if bias is None else output + bias[:, :, None, None]


def _scale(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = torch.zeros_like(weight) if bias is None else bias
    if isinstance(module, _BatchNorm):
        assert module.running_var is not None
        assert module.running_mean is not None
        # Fold the statistics into weight and bias: activations are large and are read only once.
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


def convolution_gradients(site: Site, inputs: Tensor, deltas: Tensor) -> Params:
    """Return the gradients of a convolution's parameters for every row: (B, L, *shape).

    `inputs` are (B, L or 1, ...), `deltas` at the outputs (B, L, ...).
    """
    assert isinstance(site.module, nn.Conv2d)
    grads = {site.layer.weight: _weight_gradients(site.module, inputs, deltas)}
    if site.layer.bias is not None:
        grads[site.layer.bias] = deltas.sum((3, 4))
    return grads


def _weight_gradients(module: nn.Conv2d, inputs: Tensor, deltas: Tensor) -> Tensor:
    size, labels = deltas.shape[:2]
    rows, shape = size * labels, module.weight.shape
    if module.groups == 1 and (inputs.shape[1] == 1 or _is_large(module)):
        # Rows that share an input share its patches, and one matrix product serves them.
        patches = input_positions(module, inputs.flatten(0, 1)).unflatten(0, (size, -1))
        by_input = deltas.flatten(3) if inputs.shape[1] > 1 else deltas.flatten(1, 2).flatten(2)
        return (by_input @ patches.squeeze(1)).view(size, labels, *shape)
    x = inputs.expand(-1, labels, *inputs.shape[2:]).flatten(0, 1)
    padded, padding = _padded(module, x)
    gradient = conv2d_weight(
        padded.flatten(0, 1).unsqueeze(0),
        torch.Size((rows * shape[0], *shape[1:])),
        deltas.flatten(0, 2).unsqueeze(0),
        module.stride,
        padding,
        module.dilation,
        rows * module.groups,
    )
    return gradient.view(size, labels, *shape)


def _is_large(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.weight.numel() > LARGEST_GROUPED


def _padded(module: nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input and the zero padding to convolve with; pad other modes right away."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, module.padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0, 0)


def _output_shape(module: nn.Conv2d, padded: Tensor, padding: tuple[int, ...]) -> list[int]:
    sizes = zip(
        padded.shape[2:],
        padding,
        module.dilation,
        module.kernel_size,
        module.stride,
        strict=True,
    )
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in sizes]
