"""The settings of the paper's MNIST experiments, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from studies.rotated_mnist.settings import RANDOM
from studies.settings import require_positive_fields
from studies.training import BayesByBackprop


@final
@dataclass(frozen=True)
class PaperMnist:
    """All settings of the study."""

    seeds: tuple[int, ...] = (0, 1, 2)
    hidden: tuple[int, ...] = (1200, 1200)
    train_images: int | None = None  # all but the validation images
    validation: int = 5000  # images, cut from the training set
    angles: tuple[int, ...] = tuple(range(0, 181, 15))
    images: int = 10_000  # of every angle, for all methods
    samples: int = 30  # of the posterior
    bins: int = 20
    bayes_by_backprop: BayesByBackprop = BayesByBackprop()

    def __post_init__(self) -> None:
        require_positive_fields(
            self, "hidden", "train_images", "validation", "images", "samples", "bins"
        )
        if 0 not in self.angles:
            raise ValueError("the angles must include 0: other angles are compared with it")
        if not self.seeds:
            raise ValueError("there must be at least one seed")

    @property
    def shifts(self) -> tuple[str, ...]:
        """All shifts of test digits, upright first: every angle, and random angles."""
        angles = sorted(self.angles, key=bool)
        return (*(f"{angle}°" for angle in angles), RANDOM)


PRESETS: Mapping[str, PaperMnist] = {"full": PaperMnist()}
