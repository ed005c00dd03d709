"""Networks for CIFAR-10 whose weights are in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor, nn

from studies.data import cifar10
from studies.data.folder import data_folder
from studies.models import MODELS, load_weights
from studies.store.record import digest


@final
@dataclass(frozen=True)
class Weights:
    """A network for CIFAR-10, and the file of its weights.

    Args:
        model: one of `MODELS`.
        path: a safetensors file.
        classes: that it tells apart.
    """

    model: str
    path: Path
    classes: int = 10

    @staticmethod
    def given(model: str, classes: int = 10) -> Weights:
        """Return a network whose trained weights are in the data folder."""
        file = MODELS[model].weights
        if file is None:
            raise ValueError(f"{model} has no trained weights: train it, or take another")
        return Weights(model, data_folder() / "weights" / file, classes)

    @property
    def checksum(self) -> str:
        """The SHA-256 of the file."""
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no weight file {self.path}")
        return digest(self.path.read_bytes())

    def build(self) -> nn.Module:
        """Return the network in eval mode with these weights."""
        network = MODELS[self.model].untrained(seed=0, classes=self.classes)
        load_weights(network, self.path)
        return network.eval()

    def prepare(self, images: Tensor) -> Tensor:
        """Bring stored images, which are bytes, to what the network takes."""
        return MODELS[self.model].normalise(cifar10.to_unit(images))
