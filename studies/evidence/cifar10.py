"""CIFAR-10: given networks, and three ResNet-20 of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from studies.cifar10_c.settings import SCRATCH
from studies.cifar10_c.study import split_off
from studies.corruptions import BENCHMARK, Cifar10C
from studies.data import Labelled, cifar10, shuffled
from studies.evidence.methods import MAIN, METHODS
from studies.evidence.settings import OWN, OWN_SEEDS, EvidenceStudy
from studies.evidence.subjects import CLEAN, Subject
from studies.models.weights import Weights

# The weights of our networks, with the command that trains them in a README.
OWN_WEIGHTS = Path(__file__).parents[1] / "weights"
OWN_HELD_OUT = SCRATCH.choice.held_out  # training images that they have not seen


def given(name: str, study: EvidenceStudy, cache: Path) -> list[Subject]:
    """Return a network with given weights. Held-out images are cut from the test set."""
    train, test = cifar10.load("train"), cifar10.load("test")
    held_out = test.take(shuffled(len(test.labels), study.seed)[: study.held_out])
    split = Split.of(train, held_out, study)
    return [_subject(name, 0, Weights.given(name), split, TestImages.of(study, cache))]


def own(study: EvidenceStudy, cache: Path) -> list[Subject]:
    """Return the networks that `studies train cifar10-c` trained, of all seeds.

    They have not seen `OWN_HELD_OUT` training images, which are the held-out images here. The first
    network knows the ensemble.
    """
    split = Split.of(*split_off(cifar10.load("train"), OWN_HELD_OUT), study)
    test = TestImages.of(study, cache)

    def network(seed: int) -> Subject:
        weights = Weights("resnet20", OWN_WEIGHTS / f"resnet20-seed{seed}.safetensors")
        return replace(_subject(OWN, seed, weights, split, test), methods=MAIN)

    networks = [network(seed) for seed in study.seeds if seed in OWN_SEEDS]
    members = tuple(networks) if len(networks) > 1 else ()
    return [replace(networks[0], members=members), *networks[1:]]


@final
@dataclass(frozen=True, eq=False)
class Split:
    """Images for posteriors and densities, and held-out images."""

    train: Labelled
    held_out: Labelled

    @staticmethod
    def of(train: Labelled, held_out: Labelled, study: EvidenceStudy) -> Split:
        """Return as many training images as the study asks for, at random."""
        rows = shuffled(len(train.labels), study.seed)[: study.train_images]
        return Split(train.take(rows), held_out)


@final
@dataclass(frozen=True, eq=False)
class TestImages:
    """Test images, under all corruptions at some severities."""

    images: Cifar10C
    severities: tuple[int, ...]

    @staticmethod
    def of(study: EvidenceStudy, cache: Path) -> TestImages:
        """Return as many as the study asks for, after those held out for given networks."""
        order = shuffled(len(cifar10.load("test").labels), study.seed)
        numbers = order[study.held_out :][: study.test]
        return TestImages(Cifar10C.of_test_set(numbers.tolist(), cache), study.severities)

    @property
    def shifts(self) -> Mapping[str, str]:
        """Shift -> its group."""
        corrupted = {f"{c} {s}": f"severity {s}" for s in self.severities for c in BENCHMARK}
        return {CLEAN: CLEAN, **corrupted}

    def load(self, shift: str) -> Labelled:
        """Return the images of a shift."""
        if shift == CLEAN:
            return self.images.clean
        corruption, severity = shift.rsplit(" ", 1)
        return self.images.load(corruption, int(severity))


def _subject(name: str, seed: int, weights: Weights, split: Split, test: TestImages) -> Subject:
    return Subject(
        name=name,
        network=name,
        seed=seed,
        build=weights.build,
        prepare=lambda x: weights.prepare(x).contiguous(memory_format=torch.channels_last),
        train=split.train,
        held_out=split.held_out,
        shifts=test.shifts,
        load=test.load,
        decided=(weights.checksum, test.images.official),
        methods=METHODS,
    )
