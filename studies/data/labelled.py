"""Inputs with their labels, and how they are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
