"""The settings of the study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

NETWORKS = ("mnist", "resnet20", "resnet56", "resnet18")


@final
@dataclass(frozen=True)
class EvidenceStudy:
    """The settings.

    Args:
        networks: some of `NETWORKS`.
        held_out: images for choosing, cut from the test set of CIFAR-10 (its networks have seen all
            training images) and from the training set of MNIST.
        test: images of every shift.
        severities: of the corruptions.
        angles: of the digits.
        prices: in nats, over the best temperature.
        train_images: for posteriors and densities; None takes all.
        neighbours: k of the nearest-neighbour density.
        epochs: of the MNIST network.
        resamples: for bootstrap intervals.
        seed: of splits, training and the bootstrap.
    """

    networks: tuple[str, ...] = NETWORKS
    held_out: int = 2000
    test: int = 1000
    severities: tuple[int, ...] = (3, 5)
    angles: tuple[int, ...] = (15, 30, 45, 60, 75, 90, 105, 120, 135, 150, 165, 180)
    prices: tuple[float, ...] = (0.003, 0.01, 0.03)
    train_images: int | None = 10_000
    neighbours: int = 10
    epochs: int = 8
    resamples: int = 1000
    seed: int = 0


PRESETS: Mapping[str, EvidenceStudy] = {
    "quick": EvidenceStudy(
        networks=("mnist", "resnet20"),
        held_out=1000,
        test=200,
        severities=(5,),
        angles=(30, 60, 90, 180),
        train_images=5000,
        epochs=3,
    ),
    "full": EvidenceStudy(),
}
