"""How the networks of CIFAR-10 are trained, as plain data.

The source of every number is stated. "SWAG's commands" are those in the README files of the code of
Maddox et al. (2019), https://github.com/wjmaddox/swa_gaussian, which repeat their paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, final

import torch
from torch import Tensor, nn

from studies.data.cifar10 import CLASSES, crop_and_flip, to_unit
from studies.data.folder import data_folder
from studies.engine.study import Model
from studies.models import MODELS
from studies.training import Averaging

WEIGHTS = "weights"  # folder of given weights, below the data folder


@final
@dataclass(frozen=True)
class Recipe:
    """A network and how to train it.

    Attributes:
        model: its name in `MODELS`.
        start: random weights, or those given in a file.
        training: the schedule.
    """

    model: str
    start: Literal["random", "given"] = "random"
    training: Averaging = Averaging()

    def built(self) -> Model:
        """Return the network as the engine takes it: images are stored as bytes."""
        if self.model not in MODELS:
            raise ValueError(f"there is no network {self.model!r}, only {', '.join(MODELS)}")
        network, folder = MODELS[self.model], data_folder() / WEIGHTS
        if self.start == "given" and network.weights is None:
            raise ValueError(f"no weights are given for {self.model!r}: start from random ones")

        def build() -> nn.Module:
            return network.build(len(CLASSES))

        def prepare(images: Tensor) -> Tensor:
            return network.normalise(to_unit(images))

        def augment(images: Tensor, generator: torch.Generator) -> Tensor:
            return network.normalise(crop_and_flip(to_unit(images), generator))

        def load_given() -> nn.Module:
            return network.trained(folder, len(CLASSES))

        if self.start == "random":
            return Model(self.model, build, prepare, augment)
        assert network.weights is not None
        return Model(self.model, build, prepare, augment, folder / network.weights, load_given)


# SWAG's commands state VGG16 for CIFAR-100; an earlier version says that CIFAR-10 has the same.
VGG16 = Averaging()
# SWAG's commands, which name CIFAR-10 and CIFAR-100.
WIDE_RESNET = Averaging(learning_rate=0.1, swa_learning_rate=0.05)
# A short schedule of ours for ResNet-20: 16 epochs, then 6 whose weights are collected. The rates
# are those of SWAG's PreResNet-164 for CIFAR-10. An epoch in bfloat16 takes 95 s on one core with
# AVX-512, in single precision twice as long.
RESNET_SCRATCH = Averaging(
    epochs=22,
    swa_start=16,
    learning_rate=0.1,
    swa_learning_rate=0.01,
    weight_decay=3e-4,
    precision="bfloat16",
)


def constant_rate(epochs: int) -> Averaging:
    """Return SWAG from a trained network on: one epoch to leave its minimum, then collection.

    All of it is a guess except the rate, which is SWAG's for a residual network on CIFAR-10
    (PreResNet-164), and the weight decay of He et al. (2016) for ResNet-20 and -56.
    """
    return Averaging(epochs, 1, learning_rate=0.01, swa_learning_rate=0.01, weight_decay=1e-4)


# Networks with dropout are trained like those without, which is a guess. Those with given weights
# take less than an hour on two cores: an epoch of ResNet-20 took 4.3 minutes on one. That ResNet-56
# takes three times as long is estimated from its depth.
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        **{
            name: Recipe(name, training=VGG16)
            for name in ("vgg16", "vgg16_dropout", "vgg16_bn", "vgg16_bn_dropout")
        },
        **{
            name: Recipe(name, training=WIDE_RESNET)
            for name in ("wide_resnet28x10", "wide_resnet28x10_dropout")
        },
        "resnet20": Recipe("resnet20", "given", constant_rate(epochs=9)),
        "resnet56": Recipe("resnet56", "given", constant_rate(epochs=6)),
        "resnet20_scratch": Recipe("resnet20", training=RESNET_SCRATCH),
        "resnet20_dropout": Recipe("resnet20_dropout", training=RESNET_SCRATCH),
    }
)
