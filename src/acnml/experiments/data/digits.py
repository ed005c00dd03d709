"""Handwritten digits that come with scikit-learn, and rotations of them: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from scipy import ndimage
from sklearn import datasets
from torch import Tensor

SIZE = 1797  # images in the collection
SIDE = 8  # pixels in each direction
CLASSES = 10


class Labelled(NamedTuple):
    """Images with their labels."""

    images: Tensor  # (N, 1, 8, 8) float32 in [0, 1], ink on a background of 0
    labels: Tensor  # (N,) int64


@final
@dataclass(frozen=True, eq=False)
class Digits:
    """The collection in three parts that share no image."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_digits(validation: int, test: int, seed: int) -> Digits:
    """Split the 1797 digits at random: these many for validation and test, the rest for training.

    The same seed gives the same split.
    """
    if min(validation, test) < 1 or validation + test >= SIZE:
        raise ValueError(f"of {SIZE} digits, {validation} + {test} leave none for training")
    everything = _all_digits()
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
    parts = order.split([SIZE - validation - test, validation, test])
    return Digits(*(Labelled(*(tensor[part] for tensor in everything)) for part in parts))


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn images (..., H, W) counter-clockwise, with linear interpolation.

    What turns out of the frame is lost, what turns into it is background.
    """
    turned = ndimage.rotate(
        images.numpy(), degrees, axes=(-1, -2), reshape=False, order=1, mode="grid-constant"
    )
    return torch.from_numpy(turned)


def _all_digits() -> Labelled:
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / pixels.max()).astype(np.float32).reshape(SIZE, 1, SIDE, SIDE)
    return Labelled(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
