"""Data, a regression and a loader for tests of refits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acnml._util.batches import take
from cases import normal

# Labels that no line separates, so that the likelihood has a maximum.
X, Y = normal(12, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 1, 0])
QUERIES = normal(2, 2, seed=5)


def regression() -> nn.Linear:
    model = nn.Linear(2, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class Batches:
    """A loader that counts the passes over it."""

    def __init__(self, x: Any, y: Tensor, *sizes: int) -> None:
        ends = np.cumsum(sizes)
        slices = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
        self.batches = [(take(x, part), y[part]) for part in slices]
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        self.passes += 1
        yield from self.batches
