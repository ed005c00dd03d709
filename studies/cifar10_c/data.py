"""The images of the study: to train on, to choose on, and test images clean and corrupted.

Held-out images come from the test set where a network has seen all training images, and are then
no part of the evaluation. Smaller counts are the first of one random order of what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from studies.cifar10_c.study import CLEAN, Cifar10CStudy
from studies.corruptions import Cifar10C
from studies.data import cifar10
from studies.data.cifar10 import LabelledBytes
from studies.store import SettingError
from studies.store.record import digest

SPLIT_SEED = 0  # one split and one order for all seeds, which differ in their networks


@final
@dataclass(frozen=True, eq=False)
class StudyData:
    """The images of the study.

    Attributes:
        train: what networks learn from.
        held_out: what knobs are chosen on.
        clean: all test images of the evaluation, in their random order.
        corrupted: as many of these as any method sees under corruptions.
        checksum: of the held-out and the test images, and of whether corruptions are official.
    """

    train: LabelledBytes
    held_out: LabelledBytes
    clean: LabelledBytes
    corrupted: Cifar10C
    checksum: str

    @property
    def note(self) -> str:
        """Where the corrupted images are from."""
        if self.corrupted.official:
            return "CIFAR-10, with the official files of CIFAR-10-C."
        return "CIFAR-10; its corruptions are made here, with the parameters of CIFAR-10-C."

    def shifted(self, shift: str, images: int) -> LabelledBytes:
        """Return the first so many images of a shift, as many as there are at most."""
        whole = self.clean if shift == CLEAN else _corrupted(self, shift)
        return LabelledBytes(whole.images[:images], whole.labels[:images])

    def count(self, images: int, shift: str = CLEAN) -> int:
        """Return how many images there are when so many are asked for."""
        there = self.clean if shift == CLEAN else self.corrupted.clean
        return min(images, len(there.labels))

    def labels(self, images: int) -> Tensor:
        """Return the labels of the first so many test images: those of every shift."""
        return self.clean.labels[:images]


def load_data(study: Cifar10CStudy, cache: Path) -> StudyData:
    """Load CIFAR-10 and cut off the held-out images; corrupted ones are made when asked for."""
    parts = {name: cifar10.load(name) for name in ("train", "test")}
    orders = {name: _order(len(part.labels)) for name, part in parts.items()}
    source, count = study.choice.source, study.choice.held_out
    if not 0 < count < len(orders[source]):
        there = f"{len(orders[source])} images of the {source} set"
        raise SettingError(f"choice.held_out: {there} cannot spare {count}")
    chosen, orders[source] = orders[source][:count], orders[source][count:]
    held_out, test = _taken(parts[source], chosen), _taken(parts["test"], orders["test"])
    train = without_held_out(parts["train"], count if source == "train" else 0)
    numbers = orders["test"][: max(study.images.cheap, study.frontier.images)].tolist()
    corrupted = Cifar10C.of_test_set(numbers, cache)
    checksum = digest(*map(_bytes, (*held_out, *test)), f"official: {corrupted.official}")
    return StudyData(train, held_out, test, corrupted, checksum)


def without_held_out(train: LabelledBytes, held_out: int) -> LabelledBytes:
    """Return the training images that networks learn from, in their own order."""
    return _taken(train, _order(len(train.labels))[held_out:].sort().values)


@lru_cache(maxsize=4)
def _corrupted(data: StudyData, shift: str) -> LabelledBytes:
    name, severity = shift.rsplit(" ", 1)
    return data.corrupted.load(name, int(severity))


def _order(images: int) -> Tensor:
    return torch.randperm(images, generator=torch.Generator().manual_seed(SPLIT_SEED))


def _taken(data: LabelledBytes, rows: Tensor) -> LabelledBytes:
    return LabelledBytes(data.images[rows], data.labels[rows])


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().numpy().data.cast("B")
