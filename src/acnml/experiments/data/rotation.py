"""Turning images: all by one angle, or each by its own."""

from __future__ import annotations

import torch
from scipy import ndimage
from torch import Tensor


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Turn images (..., H, W) counter-clockwise, with linear interpolation.

    What turns out of the frame is lost, what turns into it is background, 0. Multiples of 90° only
    move pixels. `degrees` is one angle for all, or a tensor with one for each along the first
    dimension.
    """
    if not isinstance(degrees, Tensor):
        return _turned(images, degrees)
    if degrees.shape != images.shape[:1]:
        raise ValueError(f"{len(images)} images need one angle each, not {tuple(degrees.shape)}")
    turned = torch.empty_like(images)
    for i, angle in enumerate(degrees.tolist()):
        turned[i] = _turned(images[i], angle)
    return turned


def random_angles(count: int, seed: int) -> Tensor:
    """Return independent angles, uniform over the full circle, [0°, 360°); the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return 360 * torch.rand(count, generator=generator, dtype=torch.float64)


def _turned(images: Tensor, degrees: float) -> Tensor:
    turned = ndimage.rotate(
        images.numpy(), degrees, axes=(-1, -2), reshape=False, order=1, mode="grid-constant"
    )
    return torch.from_numpy(turned)
