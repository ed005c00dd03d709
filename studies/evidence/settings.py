"""The settings of the study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

LETTERS = "letters"
GIVEN, OWN = ("resnet20", "resnet56"), "resnet20-own"
TEXT, TABLES = "clinc150", "tables"
OWN_SEEDS = (0, 1, 2)  # of which there are weights
PRICE = 0.01  # at which everything is compared; one of the prices
CIFAR100, TINY_IMAGENET, IMAGENET = "resnet14-cifar100", "tiny-imagenet", "imagenet"
CALTECH, REVIEWS, STREAMS = "caltech101", "reviews", "streams"
NETWORKS = (
    *(LETTERS, *GIVEN, OWN, TEXT, TABLES),
    *(CIFAR100, TINY_IMAGENET, IMAGENET, CALTECH, REVIEWS, STREAMS),
)

# Names as readers know them.
TITLES: Mapping[str, str] = {
    "resnet20": "CIFAR-10, ResNet-20",
    "resnet56": "CIFAR-10, ResNet-56",
    "resnet20-own": "CIFAR-10, our ResNet-20",
    "letters": "letters, MLP",
    "resnet14-cifar100": "CIFAR-100, ResNet-14",
    "caltech101": "Caltech-101, head",
    "tiny-imagenet": "Tiny-ImageNet, head",
    "imagenet": "ImageNet, EfficientNet-lite0",
    "reviews": "film reviews, head",
    "clinc150": "CLINC150 questions, head",
    "tables": "six tables, MLP",
    "streams": "two streams, MLP",
}


@final
@dataclass(frozen=True)
class EvidenceStudy:
    """The settings.

    Args:
        networks: some of `NETWORKS`.
        held_out: inputs for choosing. They are cut from the training set where the network is ours,
            and from the test set of CIFAR-10 where it is given and has seen all training images.
        test: images of every shift.
        pictures: of every class for training heads on photographs; other parts are shares of it.
        severities: of the corruptions.
        angles: of letters.
        prices: in nats, over the best temperature.
        train_images: for posteriors and densities; None takes all.
        epochs: of heads on photographs. Networks for letters have four times as many.
        folds: pairs of domains of questions that are left out of training, from 0 to 5.
        resamples: for bootstrap intervals.
        seeds: of the networks that are ours.
        seed: of splits and the bootstrap.
    """

    networks: tuple[str, ...] = NETWORKS
    held_out: int = 2000
    test: int = 1000
    pictures: int = 60
    severities: tuple[int, ...] = (3, 5)
    angles: tuple[int, ...] = (15, 30, 45, 60, 75, 90, 105, 120, 135, 150, 165, 180)
    prices: tuple[float, ...] = (0.003, 0.01, 0.03)
    train_images: int | None = 10_000
    epochs: int = 8
    folds: int = 5
    resamples: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := set(self.networks) - set(NETWORKS):
            raise ValueError(f"there is no {unknown.pop()!r}, only {', '.join(NETWORKS)}")
        if OWN in self.networks and not set(self.seeds) & set(OWN_SEEDS):
            there = ", ".join(map(str, OWN_SEEDS))
            raise ValueError(
                f"there are weights of {OWN} for the seeds {there} alone: add one of them to "
                "seeds, or name other networks"
            )


PRESETS: Mapping[str, EvidenceStudy] = {
    "quick": EvidenceStudy(
        held_out=1000,
        test=200,
        severities=(5,),
        angles=(30, 60, 90, 180),
        train_images=5000,
        pictures=24,
        epochs=3,
        folds=1,
        seeds=(0,),
    ),
    "full": EvidenceStudy(),
}
