"""CIFAR-10: given networks, and three ResNet-20 of our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from acnml.cli._shared.digits import Labelled
from studies.cifar10_c.study import without_held_out
from studies.corruptions import BENCHMARK, Cifar10C
from studies.data import cifar10
from studies.data.folder import data_folder
from studies.evidence.methods import MAIN, METHODS
from studies.evidence.settings import OWN, EvidenceStudy
from studies.evidence.subjects import CLEAN, Subject
from studies.models import MODELS, load_weights
from studies.store.record import digest

# The weights of our networks, with the command that trains them in a README.
OWN_WEIGHTS = Path(__file__).parents[1] / "weights"
OWN_SEEDS = (0, 1, 2)  # of which there are weights
OWN_HELD_OUT = 1000  # training images that they have not seen


def given(name: str, study: EvidenceStudy, cache: Path) -> list[Subject]:
    """Return a network with given weights. Held-out images are cut from the test set."""
    model, train, test = MODELS[name], cifar10.load("train"), cifar10.load("test")
    held_out = _taken(test, _order(len(test.labels), study.seed)[: study.held_out])
    train = _taken(train, _order(len(train.labels), study.seed)[: study.train_images])
    decided = digest(_weight_file(name).read_bytes())

    def build() -> nn.Module:
        return model.trained(data_folder() / "weights")

    return [_subject(name, name, 0, build, train, held_out, decided, study, cache)]


def _weight_file(name: str) -> Path:
    return data_folder() / "weights" / str(MODELS[name].weights)


def own(study: EvidenceStudy, cache: Path) -> list[Subject]:
    """Return the networks that `studies train cifar10-c` trained, of all seeds.

    They have not seen `OWN_HELD_OUT` training images, which are the held-out images here. The first
    network knows the ensemble.
    """
    data = cifar10.load("train")
    held_out = _taken(data, _order(len(data.labels), 0)[:OWN_HELD_OUT])
    seen = without_held_out(data, OWN_HELD_OUT)
    train = _taken(seen, _order(len(seen.labels), study.seed)[: study.train_images])

    def network(seed: int) -> Subject:
        path = OWN_WEIGHTS / f"resnet20-seed{seed}.safetensors"

        def build() -> nn.Module:
            module = MODELS["resnet20"].untrained(seed)
            load_weights(module, path)
            return module

        decided = digest(path.read_bytes())
        found = _subject(OWN, "resnet20", seed, build, train, held_out, decided, study, cache)
        return replace(found, methods=MAIN)

    seeds = [seed for seed in study.seeds if seed in OWN_SEEDS]
    networks = [network(seed) for seed in seeds]
    members = tuple(networks) if len(networks) > 1 else ()
    return [replace(networks[0], members=members), *networks[1:]]


def _subject(
    name: str,
    model_name: str,
    seed: int,
    build: Callable[[], nn.Module],
    train: Labelled,
    held_out: Labelled,
    decided: object,
    study: EvidenceStudy,
    cache: Path,
) -> Subject:
    model = MODELS[model_name]
    there = len(cifar10.load("test").labels)
    test = _order(there, study.seed)[study.held_out :][: study.test]
    images = Cifar10C.of_test_set(test.tolist(), cache)
    groups = {f"{c} {s}": f"severity {s}" for s in study.severities for c in BENCHMARK}

    def load(shift: str) -> Labelled:
        if shift == CLEAN:
            return images.clean
        corruption, severity = shift.rsplit(" ", 1)
        return images.load(corruption, int(severity))

    return Subject(
        name=name,
        network=name,
        seed=seed,
        build=build,
        prepare=lambda x: model.normalise(cifar10.to_unit(x)).contiguous(
            memory_format=torch.channels_last
        ),
        train=train,
        held_out=held_out,
        shifts={CLEAN: CLEAN, **groups},
        load=load,
        decided=decided,
        methods=METHODS,
    )


def _order(images: int, seed: int) -> torch.Tensor:
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed))


def _taken(data: Labelled, rows: torch.Tensor) -> Labelled:
    return Labelled(data.inputs[rows], data.labels[rows])
