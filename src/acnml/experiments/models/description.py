"""Description: how a network is built, what its inputs look like, and where trained weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from acnml._util.seeding import seeded
from acnml.experiments.models.weights import load_weights


@final
@dataclass(frozen=True)
class Description:
    """A network of the studies.

    Attributes:
        build: number of classes -> network with random weights.
        mean: of every channel, subtracted from images in [0, 1].
        std: of every channel, by which they are divided then.
        weights: name of the file with trained weights, if there is one.
    """

    build: Callable[[int], nn.Module]
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    weights: str | None = None

    def untrained(self, seed: int, classes: int = 10) -> nn.Module:
        """Return the network with random weights, the same for the same seed.

        The global random state is left as it was.
        """
        with seeded(seed):
            return self.build(classes)

    def trained(self, folder: Path, classes: int = 10) -> nn.Module:
        """Return the network in eval mode with its trained weights, from a file in the folder."""
        if self.weights is None:
            raise ValueError("this network has no trained weights: train it, or take another")
        network = self.untrained(seed=0, classes=classes)
        load_weights(network, folder / self.weights)
        return network.eval()

    def normalise(self, images: Tensor) -> Tensor:
        """Bring images (B, C, H, W) in [0, 1] to what the network was trained on."""
        channels = len(self.mean)
        if images.ndim != 4 or images.shape[1] != channels or not images.is_floating_point():
            raise ValueError(
                f"images must be floats of shape (B, {channels}, H, W) in [0, 1], "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        mean, std = (torch.tensor(v).to(images).view(-1, 1, 1) for v in (self.mean, self.std))
        return (images - mean) / std
