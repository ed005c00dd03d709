"""Trainings as stages in a folder, which break off when a fuse burns, and what they leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stores import store_in
from studies.store import Stage
from studies.training import Processes, Task, make_together
from studies.training.loop import Augment
from tiny_study import contents

from .tiny import DATA, SEED, TRAINING, augment, tiny


class BreakError(Exception):
    """What breaks a training off."""


@dataclass
class Fuse:
    """An augmentation that does something when it is called for the n-th time."""

    left: int
    burn: Callable[[], None]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.burn()
        return augment(images, generator)


def raise_break() -> None:
    raise BreakError


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_in(out: Path, name: str, augmented: Augment, processes: Processes):
    """Train a tiny network as a stage in a folder."""
    store, stage = store_in(out, TRAINING), Stage(f"train {name}", TRAINING, SEED)
    return make_together(
        store, stage, TRAINING, lambda: Task(tiny(name), DATA, augmented), processes
    )


def assert_same_artefacts(actual: Path, expected: Path) -> None:
    found, wanted = contents(actual), contents(expected)
    assert len(wanted) == 1
    assert found.keys() == wanted.keys()
    for label, tensors in wanted.items():
        assert found[label].keys() == tensors.keys()
        assert all(torch.equal(found[label][name], tensors[name]) for name in tensors)


def result_in(out: Path) -> dict[str, Tensor]:
    (tensors,) = contents(out).values()
    return tensors
