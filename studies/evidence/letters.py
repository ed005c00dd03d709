"""Letters: small networks of our own, rotated images, and images of other things.

Unknown classes are near or far, as in OpenOOD (Yang et al. 2022): digits of MNIST are near to
letters, CIFAR-10 in grey is far from them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acnml._util.torch_state import seeded
from studies.data import Labelled, cifar10, split
from studies.data.digits import load_letters, load_mnist, rotate
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import LETTERS, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject, with_unknown
from studies.models.mlp import mlp
from studies.store import Content, Stage, Store, Work

NEAR, FAR = "near OOD", "far OOD"
EPOCHS = 4  # times those of the settings: there are few letters


def letters(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return networks for the letters A to J of notMNIST, of all seeds."""
    rest, test = split(load_letters(), [9000, 1000], study.seed)
    train, held_out = split(rest, [len(rest.labels) - study.held_out, study.held_out], study.seed)
    parts = train, held_out, test.first(study.test)
    return [_subject(parts, study, store, seed) for seed in study.seeds]


def _subject(
    parts: tuple[Labelled, Labelled, Labelled], study: EvidenceStudy, store: Store, seed: int
) -> Subject:
    train, held_out, test = parts
    unknown = {NEAR: lambda: load_mnist("test"), FAR: _grey_photographs}
    decided = (EPOCHS * study.epochs, study.held_out, study.seed, "bfloat16")

    def data(part: str) -> Labelled:
        if part in unknown:
            return unknown[part]().first(study.test)
        own = {TRAIN: train.first(study.train_images), HELD_OUT: held_out}
        return own.get(part) or Labelled(rotate(test.inputs, _angle(part)), test.labels)

    def build() -> nn.Module:
        with seeded(seed):
            network = mlp()
        trained = store.make(
            Stage(f"train {LETTERS}", decided, seed),
            lambda work: train_network(network, train, EPOCHS * study.epochs, seed, work),
        )
        network.load_state_dict(trained.load())
        return network

    def record(part: str) -> Recorded:
        named = f"{LETTERS} {part} seed {seed}"
        found = recorded(named, build, Source.of(data(part)), (decided, seed), store)
        return with_unknown(record(CLEAN), found) if part in unknown else found

    groups = {
        f"{a}°": "rotated by 45° or more" if a >= 45 else "rotated by less" for a in study.angles
    }
    shifts = {CLEAN: CLEAN, **groups, NEAR: NEAR, FAR: FAR}
    return Subject(LETTERS, LETTERS, seed, shifts, record)


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
