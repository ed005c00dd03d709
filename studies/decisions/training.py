"""Small networks, trained in seconds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from acnml._util.torch_state import seeded
from studies.models.mlp import mlp

EPOCHS, BATCH, LEARNING_RATE = 20, 64, 1e-3


def trained(x: Tensor, labels: Tensor, hidden: Sequence[int], seed: int) -> nn.Module:
    """Train a perceptron by Adam."""
    with seeded(seed), torch.enable_grad():
        network = mlp(int(labels.max()) + 1, hidden, x[0].numel())
        optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x[rows]), labels[rows]).backward()
                optimizer.step()
    return network.eval()
