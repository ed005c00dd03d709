"""Digits and letters: small networks of our own, rotated images, and images of other things.

Unknown classes are near or far, as in OpenOOD (Yang et al. 2022): notMNIST is near to MNIST, and
CIFAR-10 in grey is far from it. For networks that know letters, digits are near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from acnml._util.seeding import seeded
from studies.data import Labelled, cifar10, split
from studies.data.digits import load_letters, load_mnist, rotate
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import DIGITS, LETTERS, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject, with_unknown
from studies.models.mlp import mlp
from studies.store import Content, Stage, Store, Work

NEAR, FAR = "near OOD", "far OOD"
GREY = "CIFAR-10 in grey"
EPOCHS_OF_LETTERS = 4  # times those of digits


def digits(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return the networks of all seeds for MNIST; the first knows the ensemble."""
    train, held_out = _cut(load_mnist("train"), study)
    parts = train, held_out, load_mnist("test").first(study.test)
    everyone = range(max(study.members, max(study.seeds) + 1))
    networks = [
        _subject(DIGITS, parts, "notMNIST", load_letters, study, store, seed) for seed in everyone
    ]
    first, *rest = (networks[seed] for seed in study.seeds)
    others = [each for each in networks if each.seed != first.seed][: study.members - 1]
    return [replace(first, members=tuple(others)), *rest]


def letters(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return networks for the letters A to J of notMNIST."""
    rest, test = split(load_letters(), [9000, 1000], study.seed)
    parts = (*_cut(rest, study), test.first(study.test))
    longer = replace(study, epochs=EPOCHS_OF_LETTERS * study.epochs)
    return [
        _subject(LETTERS, parts, "MNIST", lambda: load_mnist("test"), longer, store, seed)
        for seed in study.seeds
    ]


def _cut(data: Labelled, study: EvidenceStudy) -> tuple[Labelled, Labelled]:
    sizes = [len(data.labels) - study.held_out, study.held_out]
    train, held_out = split(data, sizes, study.seed)
    return train, held_out


def _subject(
    name: str,
    parts: tuple[Labelled, Labelled, Labelled],
    near: str,
    load_near: Callable[[], Labelled],
    study: EvidenceStudy,
    store: Store,
    seed: int,
) -> Subject:
    train, held_out, test = parts

    unknown = {near: load_near, GREY: _grey_photographs}

    def data(part: str) -> Labelled:
        if part in unknown:
            return unknown[part]().first(study.test)
        parts = {TRAIN: train.first(study.train_images), HELD_OUT: held_out}
        return parts.get(part) or Labelled(rotate(test.inputs, _angle(part)), test.labels)

    def build() -> nn.Module:
        return _trained(name, train, study, store, seed)

    def record(part: str) -> Recorded:
        named = f"{name} {part} seed {seed}"
        found = recorded(named, build, Source.of(data(part)), (_training(study), seed), store)
        return with_unknown(record(CLEAN), found) if part in unknown else found

    groups = {
        f"{a}°": "rotated by 45° or more" if a >= 45 else "rotated by less" for a in study.angles
    }
    shifts = {CLEAN: CLEAN, **groups, near: NEAR, GREY: FAR}
    return Subject(name, name, seed, shifts, record)


def _angle(shift: str) -> int:
    return 0 if shift == CLEAN else int(shift.rstrip("°"))


def grey(images: Tensor) -> Tensor:
    """Return colour images (N, 3, 32, 32), stored as bytes, as grey ones (N, 1, 28, 28)."""
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    one = (cifar10.to_unit(images) * luma).sum(1, keepdim=True)
    return nn.functional.interpolate(one, size=(28, 28), mode="bilinear", antialias=True)


def _grey_photographs() -> Labelled:
    photographs = cifar10.load("test")
    return Labelled(grey(photographs.inputs[:2000]), photographs.labels[:2000])


def _trained(name: str, data: Labelled, study: EvidenceStudy, store: Store, seed: int) -> nn.Module:
    """Return the network with trained weights, as an artefact."""
    with seeded(seed):
        network = mlp()
    stage = Stage(f"train {name}", _training(study), seed)
    trained = store.make(stage, lambda work: train_network(network, data, study.epochs, seed, work))
    network.load_state_dict(trained.load())
    return network.eval()


def _training(study: EvidenceStudy) -> tuple[object, ...]:
    """Return what decides the weights of a network besides its seed; two settings draw its data."""
    return study.epochs, study.held_out, study.seed, "bfloat16"


def train_network(
    network: nn.Module, data: Labelled, epochs: int, seed: int, work: Work
) -> Content:
    """Train by SGD with momentum and a learning rate that falls along a cosine, in bfloat16."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for epoch in range(epochs):
        work.progress(epoch, epochs)
        for batch in torch.randperm(len(data.labels), generator=generator).split(500):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = network(data.inputs[batch])
                loss = nn.functional.cross_entropy(logits, data.labels[batch])
            loss.backward()
            optimizer.step()
        schedule.step()
    return Content(network.state_dict())
