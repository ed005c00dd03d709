"""What training does, as plain data: the schedule of SWAG, and a recipe for every network.

Where a number comes from is said beside it. "SWAG's commands" are those in the README files of the
code of Maddox et al. (2019), https://github.com/wjmaddox/swa_gaussian, which repeat their paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, final

from studies.study.checks import require_positive_fields

PLATEAU, DECAYED = 0.5, 0.9  # shares of the way to the SWA start between which the rate falls
SGD_DECAY = 0.01  # what SWAG's code multiplies the rate with, in the end, where nothing is averaged


@final
@dataclass(frozen=True)
class Training:
    """SGD with momentum, and the collection of its weights after every epoch from `swa_start` on.

    The defaults are the paper's for VGG16. Epochs count from 0, as in SWAG's code: with 300 epochs
    and a start at 161 there are 139 weights to average.

    Attributes:
        epochs: passes over the images, all together.
        swa_start: the first epoch whose weights are collected; `epochs` collects none.
        learning_rate: where the schedule starts.
        swa_learning_rate: where it ends, and stays while weights are collected.
        weight_decay: of all parameters.
        momentum: of SGD.
        batch_size: images in a step, those of all processes together.
        rank: number of the last deviations that SWAG keeps.
    """

    epochs: int = 300
    swa_start: int = 161
    learning_rate: float = 0.05
    swa_learning_rate: float = 0.01
    weight_decay: float = 5e-4
    momentum: float = 0.9
    batch_size: int = 128
    rank: int = 20

    def __post_init__(self) -> None:
        require_positive_fields(self, "epochs", "learning_rate", "swa_learning_rate", "batch_size")
        if not 0 <= self.swa_start <= self.epochs:
            raise ValueError(f"swa_start must be from 0 to {self.epochs}, got {self.swa_start}")
        if self.collected == 1:
            raise ValueError("one collected epoch has no variance: start earlier, or train longer")
        if self.rank < 2:
            raise ValueError(f"rank must be at least 2, got {self.rank}")
        if not (0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise ValueError("momentum must be in [0, 1), and weight_decay not negative")

    @property
    def collected(self) -> int:
        """How many epochs' weights are collected."""
        return self.epochs - self.swa_start

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch.

        Constant until half of the way to `swa_start`, linear from there until 90 % of it, and
        constant again.
        """
        way = epoch / self.swa_start if self.swa_start else 1.0
        fallen = min(max((way - PLATEAU) / (DECAYED - PLATEAU), 0.0), 1.0)
        return (1 - fallen) * self.learning_rate + fallen * self.swa_learning_rate

    def without_averaging(self) -> Training:
        """Return the baseline SGD: all epochs are the way, and the rate falls to a hundredth."""
        slow = SGD_DECAY * self.learning_rate
        return replace(self, swa_start=self.epochs, swa_learning_rate=slow)


@final
@dataclass(frozen=True)
class Recipe:
    """A network and how to train it.

    Attributes:
        model: its name in `MODELS`.
        start: random weights, or those given with the network in a file.
        training: what is done then.
    """

    model: str
    start: Literal["random", "given"] = "random"
    training: Training = Training()


# SWAG's commands state VGG16 for CIFAR-100, and an earlier version says that CIFAR-10 has the same.
VGG16 = Recipe("vgg16")
# SWAG's code has this network; that it is trained like the one without dropout is a guess.
VGG16_DROPOUT = Recipe("vgg16_dropout")
# SWAG's commands, which name CIFAR-10 beside CIFAR-100.
WIDE_RESNET = Recipe(
    "wide_resnet28x10", training=Training(learning_rate=0.1, swa_learning_rate=0.05)
)


def constant_rate(epochs: int) -> Training:
    """Return SWAG from a trained network on: one epoch to leave its minimum, then collection.

    All of it is a guess but for the rate, which is SWAG's for a residual network on CIFAR-10
    (PreResNet-164), and the weight decay of He et al. (2016) for ResNet-20 and -56.
    """
    return Training(epochs, 1, learning_rate=0.01, swa_learning_rate=0.01, weight_decay=1e-4)


# Within an hour on two cores: an epoch of ResNet-20 took 4.3 minutes on one; that ResNet-56 takes
# three times as long is judged by its depth.
RESNET20 = Recipe("resnet20", "given", constant_rate(epochs=9))
RESNET56 = Recipe("resnet56", "given", constant_rate(epochs=6))


def _by_name(*recipes: Recipe) -> Mapping[str, Recipe]:
    return MappingProxyType({recipe.model: recipe for recipe in recipes})


# Preset -> name of a network -> recipe. `paper` is for a GPU.
PRESETS: Mapping[str, Mapping[str, Recipe]] = MappingProxyType(
    {
        "paper": _by_name(VGG16, VGG16_DROPOUT, WIDE_RESNET),
        "cpu": _by_name(RESNET20, RESNET56),
    }
)
RECIPES = {name: recipe for recipes in PRESETS.values() for name, recipe in recipes.items()}
