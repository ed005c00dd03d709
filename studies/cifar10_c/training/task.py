"""What is to be learnt: a network, its images, and the order and form in which it sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from acnml import Classifier
from acnml.fitting.batches import require_classes
from studies.cifar10_c.training.settings import Recipe
from studies.data.cifar10 import CLASSES, LabelledBytes, crop_and_flip, to_unit
from studies.data.folder import data_folder
from studies.models import MODELS, Description

Normalise: TypeAlias = Callable[[Tensor], Tensor]  # images in [0, 1] -> what the network is given
WEIGHTS = "weights"  # folder of given weights, below the data folder


@final
@dataclass(frozen=True, eq=False)
class Task:
    """A network, which training changes, and what it learns.

    Attributes:
        network: its weights are where training starts.
        data: the images to learn from.
        normalise: comes after augmentation.
    """

    network: nn.Module
    data: LabelledBytes
    normalise: Normalise

    def __post_init__(self) -> None:
        images, labels = self.data
        if not len(labels):
            raise ValueError("there are no images to train on")
        one = self.normalise(to_unit(images[:1]))
        require_classes(labels, Classifier(self.network).logits(one))

    def to(self, device: torch.device) -> Task:
        """Bring all of it to a device; the images are bytes there too, and fit."""
        data = LabelledBytes(*(tensor.to(device) for tensor in self.data))
        return Task(self.network.to(device), data, self.normalise)


@final
@dataclass(frozen=True, eq=False)
class Batches:
    """All images once, in an order and with crops and flips that the generator decides.

    Attributes:
        task: has the images.
        size: of all batches but the last, which may be smaller.
        generator: on the CPU, so that every device sees the same images.
    """

    task: Task
    size: int
    generator: torch.Generator

    def __len__(self) -> int:
        return -(-len(self.task.data.labels) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Processes augment whole batches, though each learns from a share: it is cheap, and images
        # are then cropped and flipped in one way, however many processes there are.
        images, labels = self.task.data
        order = torch.randperm(len(labels), generator=self.generator)
        for rows in order.to(labels.device).split(self.size):
            augmented = crop_and_flip(to_unit(images[rows]), self.generator)
            yield self.task.normalise(augmented), labels[rows]


def prepare_task(recipe: Recipe, data: LabelledBytes, seed: int) -> Task:
    """Return a recipe's network where its training starts, with the images to learn from."""
    description = _description(recipe)
    if recipe.start == "given":
        network = description.trained(weights_file(recipe).parent, len(CLASSES))
    else:
        network = description.untrained(seed, len(CLASSES))
    return Task(network, data, description.normalise)


def weights_file(recipe: Recipe) -> Path:
    """Return where the given weights of a recipe's network are."""
    name = _description(recipe).weights
    if name is None:
        raise ValueError(f"no weights are given for {recipe.model!r}: start from random ones")
    return data_folder() / WEIGHTS / name


def _description(recipe: Recipe) -> Description:
    if recipe.model not in MODELS:
        raise ValueError(f"there is no network {recipe.model!r}, only {', '.join(MODELS)}")
    return MODELS[recipe.model]
