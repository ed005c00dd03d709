"""Labelled data, scikit-learn's handwritten digits, and rotations of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from scipy import ndimage
from sklearn import datasets
from torch import Tensor

SIZE = 1797  # images in scikit-learn's collection
SIDE = 8  # pixels in each direction
CLASSES = 10


class Labelled(NamedTuple):
    """Inputs with their labels."""

    inputs: Tensor  # (N, ...); digits are (N, 1, H, W) float32 in [0, 1], ink on a background of 0
    labels: Tensor  # (N,) int64

    def first(self, count: int | None) -> Labelled:
        """Return the first `count` inputs, or all of them for None."""
        return Labelled(self.inputs[:count], self.labels[:count])

    def take(self, rows: Tensor) -> Labelled:
        """Return the inputs with these numbers."""
        return Labelled(self.inputs[rows], self.labels[rows])


def shuffled(count: int, seed: int) -> Tensor:
    """Return the numbers below `count` in an order that depends on the seed alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def split(data: Labelled, sizes: Sequence[int], seed: int) -> list[Labelled]:
    """Split at random into disjoint parts of these sizes, which must add up to the whole.

    The same seed gives the same split.
    """
    if min(sizes) < 0 or sum(sizes) != len(data.labels):
        raise ValueError(f"{len(data.labels)} inputs cannot be split into {list(sizes)}")
    order = shuffled(len(data.labels), seed)
    return [data.take(part) for part in order.split(list(sizes))]


@final
@dataclass(frozen=True, eq=False)
class Digits:
    """The collection in three disjoint parts."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_digits(validation: int, test: int, seed: int) -> Digits:
    """Split the 1797 digits at random: these many for validation and test, the rest for training.

    The same seed gives the same split.
    """
    if min(validation, test) < 1 or validation + test >= SIZE:
        raise ValueError(f"of {SIZE} digits, {validation} + {test} leave none for training")
    return Digits(*split(all_digits(), (SIZE - validation - test, validation, test), seed))


def all_digits() -> Labelled:
    """Return the whole collection, in its own order."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / pixels.max()).astype(np.float32).reshape(SIZE, 1, SIDE, SIDE)
    return Labelled(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Rotate images (..., H, W) counter-clockwise, with linear interpolation.

    Pixels that leave the frame are lost, and new ones are background, 0. Multiples of 90° only
    move pixels. `degrees` is one angle for all images, or a tensor with one angle for each along
    the first dimension.
    """
    if not isinstance(degrees, Tensor):
        return _rotated(images, degrees)
    if degrees.shape != images.shape[:1]:
        raise ValueError(f"{len(images)} images need one angle each, not {tuple(degrees.shape)}")
    rotated = torch.empty_like(images)
    for i, angle in enumerate(degrees.tolist()):
        rotated[i] = _rotated(images[i], angle)
    return rotated


def _rotated(images: Tensor, degrees: float) -> Tensor:
    rotated = ndimage.rotate(
        images.numpy(), degrees, axes=(-1, -2), reshape=False, order=1, mode="grid-constant"
    )
    return torch.from_numpy(rotated)
