"""The settings of the paper's MNIST experiments, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from studies.rotated_mnist.settings import RANDOM, UPRIGHT
from studies.settings import require_positive_fields
from studies.training import BayesByBackprop

# The parts of the study, in the order of work: curves over rotation; naive CNML around a network of
# few training images; curves for one common learning rate; naive CNML with all training images.
PARTS = LINES, SUBSET, ONE_RATE, WHOLE = "lines", "naive-subset", "one-rate", "naive-whole"


@final
@dataclass(frozen=True)
class NaiveCnml:
    """A comparison with naive CNML, which trains again for every label of every query.

    Both start from the posterior's mean. With the weight decay of its prior, 1 / (n σ₀²), both have
    one objective, and this is CNMAP. For few training images that prior is strong: SGD then moves
    away from the mean whatever the query is. Without weight decay it is CNML.

    Attributes:
        points: queries of the scatter plots: upright ones, and as many at random angles.
        lines: queries at every one of `angles`; 0 leaves the lines out.
        angles: of the lines.
        train_images: the first of the training set, for the posterior and for naive CNML; None
            takes all.
        training: of the posterior.
        epochs: of naive CNML, for every label; the paper has 5.
        learning_rate: of its SGD, with momentum 0.9. The paper does not state it.
        batch_size: of its SGD.
        weight_decay: of its SGD; None is that of the prior. The paper does not state it.
    """

    points: int = 200
    lines: int = 25
    angles: tuple[int, ...] = (0, 30, 60, 90, 120, 150, 180)
    train_images: int | None = 3000
    training: BayesByBackprop = BayesByBackprop(epochs=75, batch_size=100)
    epochs: int = 5
    learning_rate: float = 0.01
    batch_size: int = 100
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        fields = ("points", "train_images", "epochs", "learning_rate", "batch_size")
        require_positive_fields(self, *fields)
        if not 0 <= self.lines <= self.points:
            raise ValueError(f"lines must be from 0 to points, {self.points}, got {self.lines}")

    @property
    def queries(self) -> dict[str, int]:
        """The number of queries at every shift."""
        lines = {f"{angle}°": self.lines for angle in self.angles if self.lines}
        return {**lines, UPRIGHT: self.points, RANDOM: self.points}


@final
@dataclass(frozen=True)
class PaperMnist:
    """All settings of the study."""

    parts: tuple[str, ...] = PARTS
    seeds: tuple[int, ...] = (0, 1, 2)
    hidden: tuple[int, ...] = (1200, 1200)
    train_images: int | None = None  # all but the validation images
    validation: int = 5000  # images that are cut from the training set, as in rotated-mnist
    angles: tuple[int, ...] = tuple(range(0, 181, 15))
    images: int = 10_000  # of every angle, for all methods
    samples: int = 30  # of the posterior
    bins: int = 20
    bayes_by_backprop: BayesByBackprop = BayesByBackprop()
    one_rate: BayesByBackprop = BayesByBackprop(epochs=150, variance_rate=1.0)
    subset: NaiveCnml = NaiveCnml()
    whole: NaiveCnml = NaiveCnml(
        points=10, lines=0, train_images=None, training=BayesByBackprop(), batch_size=500
    )
    alphas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # to match naive CNML

    def __post_init__(self) -> None:
        counts = ("hidden", "train_images", "validation", "images", "samples", "bins", "alphas")
        require_positive_fields(self, *counts)
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"there is no part {part!r}, only {', '.join(PARTS)}")
        if 0 not in self.angles:
            raise ValueError("the angles must include 0: other angles are compared with it")
        if not (self.seeds and self.parts):
            raise ValueError("there must be at least one seed and one part")

    @property
    def shifts(self) -> tuple[str, ...]:
        """All shifts of test digits, upright first: every angle, and random angles."""
        angles = sorted(self.angles, key=bool)
        return (*(f"{angle}°" for angle in angles), RANDOM)


QUICK = PaperMnist(
    seeds=(0,),
    train_images=15_000,
    images=250,
    bayes_by_backprop=BayesByBackprop(batch_size=250),
    one_rate=BayesByBackprop(epochs=40, batch_size=250, variance_rate=1.0),
    subset=NaiveCnml(points=5, lines=2, train_images=500, training=BayesByBackprop(40, 50)),
    whole=NaiveCnml(
        points=1,
        lines=0,
        train_images=None,
        training=BayesByBackprop(batch_size=250),
        batch_size=500,
        epochs=1,
    ),
)
# All parts in about an hour of one core, with hidden layers of 256 units instead of the paper's
# 1,200: naive CNML then takes a ninth of the time.
SMALL = PaperMnist(
    seeds=(0,),
    hidden=(256, 256),
    angles=tuple(range(0, 181, 30)),
    images=1000,
    one_rate=BayesByBackprop(epochs=60, batch_size=250, variance_rate=1.0),
    subset=NaiveCnml(points=60, lines=10),
    whole=NaiveCnml(
        points=5, lines=0, train_images=None, training=BayesByBackprop(), batch_size=500
    ),
)
PRESETS: Mapping[str, PaperMnist] = {"quick": QUICK, "small": SMALL, "full": PaperMnist()}
