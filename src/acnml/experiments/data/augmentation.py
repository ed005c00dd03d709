"""Random crops and flips of whole batches, in tensor operations, from a generator of their own.

They come before normalisation, so that what a crop takes from outside the image is black.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Augment images (B, C, H, W) as is usual for CIFAR-10: every image in its own way."""
    return random_flip(random_crop(images, padding, generator), generator)


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift every image by up to `padding` pixels in both directions; zeros come in."""
    if padding < 0:
        raise ValueError(f"padding must not be negative, got {padding}")
    size, _, height, width = images.shape
    top, left = _draw((2, size, 1), 2 * padding + 1, images, generator)
    rows = top + torch.arange(height, device=images.device)  # (B, H)
    columns = left + torch.arange(width, device=images.device)  # (B, W)
    padded = functional.pad(images, (padding,) * 4)
    number = torch.arange(size, device=images.device)[:, None, None]
    channels_last = padded[number, :, rows[:, :, None], columns[:, None, :]]
    return channels_last.movedim(-1, 1)


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror every second image, on average, left to right."""
    flipped = _draw((len(images), 1, 1, 1), 2, images, generator).bool()
    return torch.where(flipped, images.flip(-1), images)


def _draw(shape: tuple[int, ...], below: int, images: Tensor, generator: torch.Generator) -> Tensor:
    """Draw integers from 0 to `below` - 1 where the generator lives, for use with the images."""
    drawn = torch.randint(below, shape, generator=generator, device=generator.device)
    return drawn.to(images.device)
