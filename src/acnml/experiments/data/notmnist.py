"""notMNIST: letters A to J that look like MNIST's digits and are none, 1,000 of each."""

from __future__ import annotations

from acnml.experiments.data.catalogue import NOTMNIST
from acnml.experiments.data.folder import locate
from acnml.experiments.data.idx import load_labelled
from acnml.experiments.data.labelled import Labelled


def available() -> bool:
    """Whether all files of notMNIST are there; whether they are whole is seen on reading."""
    return all(locate(file) for file in NOTMNIST.files)


def load() -> Labelled:
    """Return the images (10000, 1, 28, 28) in [0, 1] and the labels, 0 for A to 9 for J."""
    images, labels = NOTMNIST.files
    return load_labelled(NOTMNIST, images, labels)
