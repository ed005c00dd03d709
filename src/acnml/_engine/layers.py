"""Layers: their inputs and outputs in one format, and layers with weights of every row's own.

Rows become the groups of one grouped convolution, at the cost of a plain one; kernels too large for
the cache are faster as matrix products with unfolded patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from acnml._algebra.dual import Affine
from acnml._util.params import Params

# Convolution kernels with more weights than this are applied as matrix products.
LARGEST_GROUPED = 2**18


def input_positions(module: nn.Module, x: Tensor) -> Tensor:
    """Return the vectors that an affine module multiplies: (B, [groups,] positions, in)."""
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1])
    assert isinstance(module, nn.Conv2d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    patches = functional.unfold(
        padded, module.kernel_size, dilation=module.dilation, stride=module.stride
    )
    return _grouped(patches, module.groups)


def output_positions(module: nn.Module, y: Tensor) -> Tensor:
    """Return an affine module's outputs, or gradients at them: (B, [groups,] positions, out)."""
    if isinstance(module, nn.Linear):
        return y.reshape(len(y), -1, y.shape[-1])
    assert isinstance(module, nn.Conv2d)
    return _grouped(y.flatten(2), module.groups)


def from_positions(module: nn.Module, y: Tensor, shape: torch.Size) -> Tensor:
    """Invert `output_positions`, for an output with shape (B, *shape)."""
    features_first = isinstance(module, nn.Conv2d)
    return (y.mT if features_first else y).reshape(len(y), *shape)


def _grouped(features_first: Tensor, groups: int) -> Tensor:
    """Turn (B, features, positions) into (B, [groups,] positions, features / groups)."""
    if groups == 1:
        return features_first.mT
    return features_first.unflatten(1, (groups, -1)).mT


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a scaling layer multiplies its weight with."""
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, _BatchNorm)
    return functional.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


# Weights of every row's own, and their gradients ------------------------------------------------


def scaling_gradients(module: nn.Module, layer: Affine, inputs: Tensor, deltas: Tensor) -> Params:
    """Return the gradients of a scaling layer's weight and bias for every row: (B, L, *shape).

    `inputs` are normalised and (B, L or 1, ...), `deltas` at the layer's outputs are (B, L, ...).
    """
    if isinstance(module, nn.LayerNorm):  # parameters live in the last dimensions
        first = deltas.ndim - len(module.normalized_shape)
        both = inputs * deltas, deltas
        weight, bias = (t.flatten(2, first - 1).sum(2) if first > 2 else t for t in both)
    else:
        d, x = (t.flatten(3) if t.ndim > 3 else t.unsqueeze(3) for t in (deltas, inputs))
        # Labels that share the input take one matrix product per channel.
        one = x.shape[1] == 1
        weight = torch.einsum("blcp,bcp->blc", d, x[:, 0]) if one else (d * x).sum(3)
        bias = d.sum(3)
    grads = {layer.weight: weight}
    return grads if layer.bias is None else {**grads, layer.bias: bias}


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


def convolution_gradients(
    module: nn.Module, layer: Affine, inputs: Tensor, deltas: Tensor
) -> Params:
    """Return the gradients of a convolution's parameters for every row: (B, L, *shape).

    `inputs` are (B, L or 1, ...), `deltas` at the outputs (B, L, ...).
    """
    assert isinstance(module, nn.Conv2d)
    grads = {layer.weight: _weight_gradients(module, inputs, deltas)}
    if layer.bias is not None:
        grads[layer.bias] = deltas.sum((3, 4))
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
