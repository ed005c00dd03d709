"""The images of the study: to train on, to choose on, and test digits as they turn away.

Smaller counts are the first of one random order of the test set, so that they are fair samples of
it (MNIST's first half is easier than its second) and all methods see the same images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch

from acnml.cli._shared.digits import Labelled, random_angles, rotate, split
from studies.data import notmnist
from studies.data.digits import handwritten_digits
from studies.rotated_mnist.study import LETTERS, RANDOM, RotatedMnist, degrees
from studies.store.record import digest

SPLIT_SEED = 0  # one split and one order for all seeds, which differ in their networks


@final
@dataclass(frozen=True, eq=False)
class StudyData:
    """The images, where they come from, and a checksum of all that they are."""

    note: str
    train: Labelled
    validation: Labelled
    test: Labelled
    letters: Labelled | None  # out-of-distribution images whose labels mean nothing
    checksum: str

    def shifted(self, shift: str, images: int) -> Labelled:
        """Return the first so many images of a shift, as many as there are at most."""
        whole = _shifted(self, shift)
        return Labelled(whole.images[:images], whole.labels[:images])

    def count(self, images: int) -> int:
        """Return how many test images there are when so many are asked for."""
        return min(images, len(self.test.labels))


def load_data(study: RotatedMnist) -> StudyData:
    """Return MNIST and notMNIST, or scikit-learn's digits where there is no MNIST."""
    digits = handwritten_digits()
    data = len(digits.train.labels)
    validation = min(study.choice.validation, data // 4)
    train = min(study.train_images or data, data - validation)
    parts = split(digits.train, (train, validation, data - train - validation), SPLIT_SEED)
    same_size = digits.test.images.shape[1:] == (1, 28, 28)
    letters = _shuffled(notmnist.load()) if same_size and notmnist.available() else None
    note = digits.note if letters else f"{digits.note} There is no notMNIST of the same size."
    test = _shuffled(digits.test)
    whole = [*parts[:2], test, *([letters] if letters else [])]
    checksum = digest(*(tensor.numpy().data.cast("B") for part in whole for tensor in part))
    return StudyData(note, parts[0], parts[1], test, letters, checksum)


@lru_cache(maxsize=16)  # every shift of a study: turning ten thousand images takes seconds
def _shifted(data: StudyData, shift: str) -> Labelled:
    if shift == LETTERS:
        assert data.letters is not None  # or it would not be among the shifts
        return data.letters
    images, labels = data.test
    turned = random_angles(len(labels), SPLIT_SEED) if shift == RANDOM else degrees(shift)
    return Labelled(rotate(images, turned), labels)


def _shuffled(data: Labelled) -> Labelled:
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return Labelled(data.images[order], data.labels[order])
