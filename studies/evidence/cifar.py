"""CIFAR-10 and CIFAR-100 under corruptions: given networks, and three ResNet-20 of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from studies.cifar10_c.settings import SCRATCH
from studies.cifar10_c.study import split_off
from studies.corruptions import BENCHMARK, CORRUPTIONS, Cifar10C
from studies.data import Labelled, cifar10, shuffled
from studies.engine.study import checksum
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import CIFAR100, OWN, OWN_SEEDS, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject, with_unknown
from studies.models.weights import Weights
from studies.store import Store

# The weights of our networks, with the command that trains them in a README.
OWN_WEIGHTS = Path(__file__).parents[1] / "weights"
OWN_HELD_OUT = SCRATCH.choice.held_out  # training images that they have not seen
NEAR = "CIFAR-10"  # of which CIFAR-100 has no class


def given(name: str, study: EvidenceStudy, cache: Path, store: Store) -> list[Subject]:
    """Return a network with given weights. Held-out images are cut from the test set."""
    data = Images.given(cifar10.load("train"), cifar10.load("test"), study)
    images = Cifar10C.of_test_set(data.numbers, cache)
    return [_subject(name, 0, Weights.given(name), replace(data, official=images), study, store)]


def cifar100(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return the given network for CIFAR-100, with CIFAR-10 as unknown classes."""
    data = Images.given(cifar10.load_cifar100("train"), cifar10.load_cifar100("test"), study)
    own = _subject(CIFAR100, 0, Weights.given("resnet14", 100), data, study, store)
    return [replace(own, shifts={**own.shifts, NEAR: "unknown classes"})]


def own(study: EvidenceStudy, cache: Path, store: Store) -> list[Subject]:
    """Return the networks that `studies train cifar10-c` trained, of all seeds.

    They have not seen `OWN_HELD_OUT` training images, which are the held-out images here. The first
    network knows the ensemble.
    """
    train, held_out = split_off(cifar10.load("train"), OWN_HELD_OUT)
    given = Images.given(train, cifar10.load("test"), study)
    images = Cifar10C.of_test_set(given.numbers, cache)
    data = replace(given, held_out=held_out, official=images)

    def network(seed: int) -> Subject:
        weights = Weights("resnet20", OWN_WEIGHTS / f"resnet20-seed{seed}.safetensors")
        return _subject(OWN, seed, weights, data, study, store)

    networks = [network(seed) for seed in study.seeds if seed in OWN_SEEDS]
    return [replace(networks[0], members=tuple(networks[1:])), *networks[1:]]


@final
@dataclass(frozen=True, eq=False)
class Images:
    """Images for posteriors and densities, held-out images and test images.

    Attributes:
        train: as many as the study asks for.
        held_out: for all choices.
        test: without corruption.
        numbers: of the test images, which decide how they are corrupted.
        official: corrupted images from files, where there are some.
    """

    train: Labelled
    held_out: Labelled
    test: Labelled
    numbers: list[int]
    official: Cifar10C | None = None

    @staticmethod
    def given(train: Labelled, test: Labelled, study: EvidenceStudy) -> Images:
        """Cut held-out images from the test images."""
        order = shuffled(len(test.labels), study.seed)
        rows = order[study.held_out :][: study.test]
        few = shuffled(len(train.labels), study.seed)[: study.train_images]
        parts = train.take(few), test.take(order[: study.held_out]), test.take(rows)
        return Images(*parts, rows.tolist())

    def corrupted(self, shift: str) -> Labelled:
        """Return the test images under a corruption."""
        name, severity = shift.rsplit(" ", 1)
        if self.official is not None:
            return self.official.load(name, int(severity))
        clean = np.ascontiguousarray(self.test.inputs.movedim(1, -1).numpy())
        images = torch.from_numpy(CORRUPTIONS[name](clean, int(severity), self.numbers))
        return Labelled(images.movedim(-1, 1).contiguous(), self.test.labels)


def _subject(
    name: str, seed: int, weights: Weights, data: Images, study: EvidenceStudy, store: Store
) -> Subject:
    shifts: Mapping[str, str] = {
        CLEAN: CLEAN,
        **{f"{c} {s}": f"severity {s}" for s in study.severities for c in BENCHMARK},
    }

    def prepare(x: Tensor) -> Tensor:
        return weights.prepare(x).contiguous(memory_format=torch.channels_last)

    def images(part: str) -> Labelled:
        near = partial(cifar10.load, "test")
        return {
            TRAIN: lambda: data.train,
            HELD_OUT: lambda: data.held_out,
            CLEAN: lambda: data.test,
            NEAR: lambda: near().first(study.test),
        }.get(part, lambda: data.corrupted(part))()

    def record(part: str) -> Recorded:
        found = recorded(f"{name} {part}", weights.build, source(part), weights.checksum, store)
        return with_unknown(record(CLEAN), found) if part == NEAR else found

    def source(part: str) -> Source:
        if data.official is None and part in shifts:  # corrupted block by block, where missing
            loaded: list[Labelled] = []

            def read(rows: slice) -> Tensor:
                loaded[:] = loaded or [images(part)]
                return prepare(loaded[0].inputs[rows])

            return Source(data.test.labels, checksum(data.test, f"{part} {data.numbers}"), read)
        return Source.of(images(part), prepare)

    return Subject(name, name, seed, shifts, record)
