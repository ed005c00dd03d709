"""Convolutions with weights of their own for every row, written out.

Rows become groups: one grouped convolution serves them all, at the cost of the plain one. Kernels
too large for the cache go faster as matrix products with unfolded patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from acnml._engine.layers import input_positions

LARGEST_GROUPED = 2**18  # weights of a kernel


def convolve(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve every row x (R, ...) with its own weight (R, *shape) and bias (R, out)."""
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


def weight_gradients(module: nn.Conv2d, inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return every row's gradient by its weight (B, L, *shape).

    Inputs are (B, L or 1, ...), deltas at the outputs (B, L, ...). Rows that share an input share
    its patches, and one matrix product serves them.
    """
    size, labels = deltas.shape[:2]
    rows, shape = size * labels, module.weight.shape
    if module.groups == 1 and (inputs.shape[1] == 1 or _is_large(module)):
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
    """Return what to convolve and the zeros to pad it with; other kinds of padding are done."""
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
