"""The multilayer perceptron of the MNIST study: 784-1200-1200-10."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(
    classes: int = 10,
    hidden: Sequence[int] = (1200, 1200),
    inputs: int = 784,
    dropout: float = 0.0,
) -> nn.Module:
    """Return a network with ReLU between its layers, for inputs (B, 784) or (B, 1, 28, 28).

    With `dropout`, every hidden unit is dropped with this probability in training.
    """
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width in pairwise(widths):
        layers += [nn.Linear(width_in, width), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
