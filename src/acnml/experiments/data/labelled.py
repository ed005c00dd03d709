"""Images with their labels, the one form in which data sets of images are handed around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Labelled(NamedTuple):
    """Images with their labels."""

    images: Tensor  # (N, 1, H, W) float32 in [0, 1], ink on a background of 0
    labels: Tensor  # (N,) int64


def split(data: Labelled, sizes: Sequence[int], seed: int) -> list[Labelled]:
    """Split at random into parts of these sizes that share no image; the sizes make up the whole.

    The same seed gives the same split.
    """
    if min(sizes) < 0 or sum(sizes) != len(data.labels):
        raise ValueError(f"{len(data.labels)} images cannot be split into {list(sizes)}")
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed))
    return [Labelled(data.images[part], data.labels[part]) for part in order.split(list(sizes))]
