"""MNIST: handwritten digits, 60,000 to train on and 10,000 to test."""

from __future__ import annotations

from typing import Literal

from acnml.experiments.data.catalogue import MNIST
from acnml.experiments.data.folder import locate
from acnml.experiments.data.idx import load_labelled
from acnml.experiments.data.labelled import Labelled


def available() -> bool:
    """Whether all files of MNIST are there; whether they are whole is seen when they are read."""
    return all(locate(file) for file in MNIST.files)


def load(split: Literal["train", "test"]) -> Labelled:
    """Return the images (N, 1, 28, 28) in [0, 1] and the labels (N,) of one of the two parts."""
    images, labels = {"train": MNIST.files[:2], "test": MNIST.files[2:]}[split]
    return load_labelled(MNIST, images, labels)
