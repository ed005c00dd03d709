"""Tiny networks of every kind in float64, and a few images to train them on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from acnml._util.torch_state import seeded
from studies.data import Labelled
from studies.data.cifar10 import crop_and_flip, to_unit
from studies.models.resnet import ResNet, SubsampleAndPad, projection
from studies.models.vgg import vgg16_bn, vgg16_bn_dropout
from studies.models.wide_resnet import WideResNet
from studies.training import Averaging, Task

SEED = 3
TRAINING = Averaging(
    epochs=5, swa_start=2, learning_rate=0.05, swa_learning_rate=0.02, batch_size=8, rank=2
)
STAGES = ((2, 3), (4,), (4,))


def plain() -> nn.Module:
    """Neither batch norm nor dropout."""
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


TINY: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "resnet_a": lambda: ResNet(3, (2, 4), 2, SubsampleAndPad),
    "resnet_b": lambda: ResNet(3, (2, 4), 2, projection),
    "wide_resnet": lambda: WideResNet(3, 1, 2),
    "vgg": lambda: vgg16_bn(3, STAGES),
    "vgg_dropout": lambda: vgg16_bn_dropout(3, STAGES),
}
each_tiny = pytest.mark.parametrize("name", TINY)


def tiny(name: str) -> nn.Module:
    with seeded(0):
        return TINY[name]().double()


def bytes_of(images: int) -> Labelled:
    """Images of 8×8 whose class is the channel that is bright."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (images,), generator=generator)
    pixels = torch.randint(100, (images, 3, 8, 8), generator=generator)
    pixels += 150 * nn.functional.one_hot(labels, 3)[:, :, None, None]
    return Labelled(pixels.to(torch.uint8), labels)


DATA = bytes_of(26)  # batches of 8, 8, 8 and 2


def normalise(images: Tensor) -> Tensor:
    return (images.double() - 0.4) / 0.3


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    return normalise(crop_and_flip(to_unit(images), generator))


def task_of(name: str) -> Task:
    return Task(tiny(name), DATA, augment)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
