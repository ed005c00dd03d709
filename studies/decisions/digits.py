"""A small network for MNIST, and digits that are rotated or noisy."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from studies.data import Labelled
from studies.data.digits import load_mnist, rotate
from studies.decisions.training import EPOCHS, trained
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.subjects import CLEAN, Subject
from studies.store import Store

NAME = "digits"
TRAIN, HELD_OUT, TEST = 10_000, 2000, 1000
HIDDEN = (100,)
ANGLES, NOISES = (15, 30, 45, 60, 75, 90), (0.1, 0.2, 0.3, 0.5)


def digits(seed: int, store: Store) -> Subject:
    """Return the network with its data."""
    images, test = load_mnist("train"), load_mnist("test").first(TEST)
    train = images.first(TRAIN)
    angles = {f"{a}°": "rotated by 45° or more" if a >= 45 else "rotated" for a in ANGLES}
    noises = {f"noise {n:g}": "noise" for n in NOISES}
    parts = {"train": train, "held out": images.take(torch.arange(TRAIN, TRAIN + HELD_OUT))}

    @cache
    def network() -> nn.Module:
        return trained(train.inputs, train.labels, HIDDEN, seed)

    def record(part: str) -> Recorded:
        data = parts.get(part) or Labelled(shifted(test.inputs, part), test.labels)
        return recorded(
            f"{NAME} seed {seed} {part}",
            network,
            Source.of(data),
            (HIDDEN, EPOCHS, seed),
            store,
        )

    shifts = {CLEAN: CLEAN, **angles, **noises}
    return Subject(f"{NAME} seed {seed}", NAME, seed, shifts, record)


def shifted(images: torch.Tensor, shift: str) -> torch.Tensor:
    """Return images under a shift, the same whenever it is asked for."""
    if shift == CLEAN:
        return images
    if shift.endswith("°"):
        return rotate(images, float(shift.rstrip("°")))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + float(shift.split()[1]) * noise).clamp(0, 1)
