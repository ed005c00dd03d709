"""A plain training loop for small networks; the same seed gives the same weights.

The global random state is not changed: weights are drawn in a fork of it, and batches come from a
generator of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from studies.data import Labelled
from studies.data.digits import CLASSES, SIDE


@final
@dataclass(frozen=True)
class Training:
    """Stochastic gradient descent with momentum on the mean negative log-likelihood."""

    epochs: int = 100
    batch_size: int = 100
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4


def small_network(hidden: int, seed: int) -> nn.Sequential:
    """Return an untrained network: 64 pixels, one hidden layer with ReLU, 10 logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
        )


def train(network: nn.Module, data: Labelled, training: Training, seed: int) -> None:
    """Train a network in place, in batches that the seed shuffles."""
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(training.epochs):
        order = torch.randperm(len(data.labels), generator=generator)
        for batch in order.split(training.batch_size):
            optimizer.zero_grad()
            logits = network(data.inputs[batch])
            nn.functional.cross_entropy(logits, data.labels[batch]).backward()
            optimizer.step()
    network.eval()
