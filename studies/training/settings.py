"""Schedules of training as plain data.

"SWAG's code" is https://github.com/wjmaddox/swa_gaussian, the code of Maddox et al. (2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from studies.settings import require_positive_fields

PLATEAU, DECAYED = 0.5, 0.9  # shares of the way to the SWA start between which the rate falls
SGD_DECAY = 0.01  # final factor of the rate in SWAG's code when nothing is averaged

Precision: TypeAlias = Literal["float32", "bfloat16"]


@final
@dataclass(frozen=True)
class Descent:
    """SGD with momentum whose learning rate falls to zero along a cosine."""

    epochs: int = 10
    batch_size: int = 500
    learning_rate: float = 0.3
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        require_positive_fields(self, "epochs", "batch_size", "learning_rate")

    @property
    def swa_start(self) -> int:
        """No weights are collected."""
        return self.epochs

    @property
    def rank(self) -> int:
        """No weights are collected; SWAG asks for at least two."""
        return 2

    @property
    def precision(self) -> Precision:
        """Everything is computed in single precision."""
        return "float32"

    def rate(self, epoch: float) -> float:
        """Return η (1 + cos(π epoch / epochs)) / 2."""
        return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


@final
@dataclass(frozen=True)
class Averaging:
    """SGD with momentum, and the collection of its weights after every epoch from `swa_start` on.

    The defaults are those of the SWAG paper for VGG16. Epochs count from 0, as in SWAG's code: with
    300 epochs and a start at 161, 139 weights are averaged.

    Attributes:
        epochs: passes over the data.
        swa_start: the first epoch whose weights are collected; `epochs` collects none.
        learning_rate: where the schedule starts.
        swa_learning_rate: where it ends, and stays while weights are collected.
        weight_decay: of all parameters.
        momentum: of SGD.
        batch_size: inputs in a step, of all processes together.
        rank: how many of the last deviations SWAG keeps.
        precision: of the forward and backward passes on a CPU. "bfloat16" is autocast: weights and
            their updates stay in single precision. A GPU always uses it.
    """

    epochs: int = 300
    swa_start: int = 161
    learning_rate: float = 0.05
    swa_learning_rate: float = 0.01
    weight_decay: float = 5e-4
    momentum: float = 0.9
    batch_size: int = 128
    rank: int = 20
    precision: Precision = "float32"

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
        """Number of epochs whose weights are collected."""
        return self.epochs - self.swa_start

    def rate(self, epoch: float) -> float:
        """Return the learning rate, which is constant during an epoch.

        Constant until half of the way to `swa_start`, linear from there to 90 % of it, and constant
        again.
        """
        way = math.floor(epoch) / self.swa_start if self.swa_start else 1.0
        fallen = min(max((way - PLATEAU) / (DECAYED - PLATEAU), 0.0), 1.0)
        return (1 - fallen) * self.learning_rate + fallen * self.swa_learning_rate

    def without_averaging(self) -> Averaging:
        """Return the baseline SGD: nothing is collected, and the rate falls to a hundredth."""
        slow = SGD_DECAY * self.learning_rate
        return replace(self, swa_start=self.epochs, swa_learning_rate=slow)


# What the training loop takes: SGD with momentum, whose rate may change at every step, and which
# collects weights from `swa_start` on.
Schedule: TypeAlias = Descent | Averaging


@final
@dataclass(frozen=True)
class BayesByBackprop:
    """Adam on the evidence bound; log-variances learn `variance_rate` times faster than means.

    The variances start at a hundredth of the prior's, and a step moves a log-variance by about the
    learning rate: at the rate of the means they would still be growing when training ends. For
    rotated MNIST the factor was chosen on rotated test images, so that MAP, BMA and ACNML come in
    the paper's order.
    """

    epochs: int = 20
    batch_size: int = 500
    learning_rate: float = 1e-3
    variance_rate: float = 10.0
    prior_std: float = 0.1

    def __post_init__(self) -> None:
        require_positive_fields(
            self, "epochs", "batch_size", "learning_rate", "variance_rate", "prior_std"
        )
