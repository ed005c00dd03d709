"""The networks of the study with their data: given CIFAR-10 networks, and a small one for MNIST."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from acnml._util.seeding import seeded
from acnml.cli._shared.digits import Labelled, rotate, split
from studies.corruptions import BENCHMARK, Cifar10C
from studies.data import cifar10
from studies.data.digits import load_mnist
from studies.data.folder import data_folder
from studies.evidence.settings import EvidenceStudy
from studies.models import MODELS
from studies.models.mlp import mlp
from studies.store import Content, Stage, Store, Work

TEST_IMAGES, TRAIN_IMAGES = 10_000, 50_000
CLEAN, TRAIN, HELD_OUT = "clean", "train", "held out"


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """A network with its data."""

    name: str
    build: Callable[[], nn.Module]  # trained
    prepare: Callable[[Tensor], Tensor]  # stored images -> inputs
    train: Labelled
    held_out: Labelled
    shifts: Mapping[str, str]  # shift -> its group
    load: Callable[[str], Labelled]  # a shift's images

    @cached_property
    def network(self) -> nn.Module:
        """The trained network, in the memory layout that is fastest for convolutions."""
        network: nn.Module = self.build().eval()
        for parameter in network.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return network

    def data(self, part: str) -> Labelled:
        """Return the training or held-out images, or those of a shift."""
        return {TRAIN: lambda: self.train, HELD_OUT: lambda: self.held_out}.get(
            part, lambda: self.load(part)
        )()


def subject(name: str, study: EvidenceStudy, cache: Path, store: Store) -> Subject:
    """Return a network of the study by name."""
    if name == "mnist":
        return mnist_subject(study, store)
    return cifar_subject(name, study, cache)


def cifar_subject(name: str, study: EvidenceStudy, cache: Path) -> Subject:
    """Return a CIFAR-10 network with given weights."""
    order = torch.randperm(TEST_IMAGES, generator=torch.Generator().manual_seed(study.seed))
    held_out, test = order[: study.held_out], order[study.held_out :][: study.test]
    all_test, images = cifar10.load("test"), Cifar10C.of_test_set(test.tolist(), cache)
    chosen = torch.randperm(TRAIN_IMAGES, generator=torch.Generator().manual_seed(study.seed))
    train, some = cifar10.load("train"), chosen[: study.train_images]
    groups = {f"{c} {s}": f"severity {s}" for s in study.severities for c in BENCHMARK}
    model = MODELS[name]

    def load(shift: str) -> Labelled:
        if shift == CLEAN:
            return images.clean
        corruption, severity = shift.rsplit(" ", 1)
        return images.load(corruption, int(severity))

    return Subject(
        name,
        lambda: model.trained(data_folder() / "weights"),
        lambda x: model.normalise(cifar10.to_unit(x)).contiguous(memory_format=torch.channels_last),
        Labelled(train.inputs[some], train.labels[some]),
        Labelled(all_test.inputs[held_out], all_test.labels[held_out]),
        {CLEAN: CLEAN, **groups},
        load,
    )


def mnist_subject(study: EvidenceStudy, store: Store) -> Subject:
    """Return a network with two hidden layers, trained on MNIST."""
    everything = load_mnist("train")
    sizes = [len(everything.labels) - study.held_out, study.held_out]
    train, held_out = split(everything, sizes, study.seed)
    test = load_mnist("test").first(study.test)

    def build() -> nn.Module:
        with seeded(study.seed):
            network = mlp(10)
        stage = Stage("train mnist", (study.epochs, study.held_out), study.seed)
        trained = store.make(stage, lambda work: train_digits(network, train, study, work))
        network.load_state_dict(trained.load())
        return network

    def load(shift: str) -> Labelled:
        angle = 0 if shift == CLEAN else int(shift.rstrip("°"))
        return Labelled(rotate(test.inputs, angle), test.labels)

    groups = {
        f"{a}°": "rotated by 45° or more" if a >= 45 else "rotated by less" for a in study.angles
    }
    some = train.first(study.train_images)
    return Subject("mnist", build, lambda x: x, some, held_out, {CLEAN: CLEAN, **groups}, load)


def train_digits(network: nn.Module, data: Labelled, study: EvidenceStudy, work: Work) -> Content:
    """Train by SGD with momentum and a learning rate that falls along a cosine."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, study.epochs)
    generator = torch.Generator().manual_seed(study.seed)
    for epoch in range(study.epochs):
        work.progress(epoch, study.epochs)
        for batch in torch.randperm(len(data.labels), generator=generator).split(500):
            optimizer.zero_grad()
            logits = network(data.inputs[batch])
            nn.functional.cross_entropy(logits, data.labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return Content(network.state_dict())
