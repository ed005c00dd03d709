"""The settings of the rotated-MNIST study, and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from studies.engine.method import ALPHA, SCALE, TAU, TEMPERATURE, Grids
from studies.settings import require_positive_fields
from studies.training import Averaging, BayesByBackprop, Descent

UPRIGHT, RANDOM, LETTERS = "0°", "random", "notMNIST"  # shifts; the others are angles


def degrees(shift: str) -> float:
    """Return the angle that a shift names.

    >>> degrees("60°")
    60.0
    """
    number, sign, rest = shift.partition("°")
    if not sign or rest:
        raise ValueError(f"there is no shift {shift!r}: write an angle such as 60°, or {RANDOM}")
    return float(number)


@final
@dataclass(frozen=True)
class Swag:
    """SGD at a constant learning rate from the trained network; weights are kept every epoch."""

    epochs: int = 10
    batch_size: int = 500
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        require_positive_fields(self, "epochs", "batch_size", "learning_rate")

    @property
    def schedule(self) -> Averaging:
        """The schedule of training."""
        rate, size = self.learning_rate, self.batch_size
        return Averaging(self.epochs, 0, rate, rate, weight_decay=0.0, batch_size=size)


@final
@dataclass(frozen=True)
class Images:
    """How many test images a method sees at every shift, by its cost."""

    cheap: int = 10_000  # about 2 ms an image at most
    paper_steps: int = 500  # the paper's 5 or 10 gradient steps: 10 to 30 ms
    converged: int = 40  # linearised and polished by 10 gradient steps: 100 ms
    beside: float = 0.25  # share of these for methods of 30 forward passes that the paper has not

    def __post_init__(self) -> None:
        require_positive_fields(self, "cheap", "paper_steps", "converged", "beside")


@final
@dataclass(frozen=True)
class Sweep:
    """The sweep of every family's knob, for the first seed."""

    images: int = 2000  # of every shift
    shifts: tuple[str, ...] = (UPRIGHT, "60°", "90°", "180°", RANDOM)
    temperatures: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
    alphas: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    prior_precisions: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    covariance_scales: tuple[float, ...] = (0.1, 0.3, 1.0, 1.5, 2.0)

    def __post_init__(self) -> None:
        grids = ("temperatures", "alphas", "prior_precisions", "covariance_scales")
        require_positive_fields(self, "images", *grids)

    @property
    def grids(self) -> Grids:
        """The values of every knob."""
        return {
            TEMPERATURE: self.temperatures,
            ALPHA: self.alphas,
            TAU: self.prior_precisions,
            SCALE: self.covariance_scales,
        }


@final
@dataclass(frozen=True)
class Choice:
    """How knobs are chosen, on upright validation images alone.

    The most cautious value whose NLL is at most `tolerance` nats above the plain network's.
    """

    validation: int = 5000  # images, cut from the training set
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        require_positive_fields(self, "validation")


@final
@dataclass(frozen=True)
class RotatedMnist:
    """All settings of the study."""

    seeds: tuple[int, ...] = (0, 1, 2)
    hidden: tuple[int, ...] = (1200, 1200)
    train_images: int | None = None  # all of them
    angles: tuple[int, ...] = tuple(range(0, 181, 15))
    members: int = 5  # of the ensemble
    dropout: float = 0.5
    samples: int = 30  # of posteriors and of dropout masks
    bins: int = 20
    training: Descent = Descent()
    bayes_by_backprop: BayesByBackprop = BayesByBackprop()
    swag: Swag = Swag()
    images: Images = Images()
    choice: Choice = Choice()
    frontier: Sweep = Sweep()

    def __post_init__(self) -> None:
        require_positive_fields(self, "hidden", "train_images", "members", "samples", "bins")
        if 0 not in self.angles:
            raise ValueError("the angles must include 0: other angles are compared with it")
        if not self.seeds:
            raise ValueError("there must be at least one seed")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        for shift in self.frontier.shifts:
            if shift != RANDOM:
                degrees(shift)

    @property
    def shifts(self) -> tuple[str, ...]:
        """All shifts of test digits, upright first: every angle, and random angles."""
        angles = sorted(self.angles, key=bool)
        return (*(f"{angle}°" for angle in angles), RANDOM)


QUICK = RotatedMnist(
    seeds=(0,),
    train_images=15_000,
    members=3,
    bayes_by_backprop=BayesByBackprop(batch_size=250),
    images=Images(cheap=500, paper_steps=100, converged=10),
    choice=Choice(validation=1000),
    frontier=Sweep(images=200),
)
PRESETS: Mapping[str, RotatedMnist] = {"quick": QUICK, "full": RotatedMnist()}
