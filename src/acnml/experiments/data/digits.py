"""Handwritten digits that come with scikit-learn: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from sklearn import datasets

from acnml.experiments.data.labelled import Labelled, split

SIZE = 1797  # images in the collection
SIDE = 8  # pixels in each direction
CLASSES = 10


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
    return Digits(*split(all_digits(), (SIZE - validation - test, validation, test), seed))


def all_digits() -> Labelled:
    """Return the whole collection, in its own order."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / pixels.max()).astype(np.float32).reshape(SIZE, 1, SIDE, SIDE)
    return Labelled(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
