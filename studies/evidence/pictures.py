"""Photographs of 101 to 1,000 classes, on the features of EfficientNet-lite0.

- Tiny-ImageNet: a head with two layers for 180 classes; the other 20 are unknown. The shifts are
  corruptions of Tiny-ImageNet-C. The network sees 128 pixels, here and for Caltech-101.
- Caltech-101: a linear head. The shifts take colour, surfaces and detail from the test pictures.
- ImageNet: the network as it is, with its 1,000 classes. There is one picture of each class: for
  the score, for choosing and for testing, in this ratio. The shift is Tiny-ImageNet, enlarged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import nn

from acnml._util.torch_state import seeded
from studies.corruptions import Corruption
from studies.corruptions.larger import PHOTOGRAPHS, TINY
from studies.data import Labelled
from studies.data import pictures as files
from studies.data.labelled import shuffled
from studies.data.pictures import Pictures, by_class
from studies.engine.study import checksum
from studies.evidence.encoder import encoded
from studies.evidence.recorded import Recorded
from studies.evidence.settings import CALTECH, IMAGENET, TINY_IMAGENET, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, UNKNOWN, Subject, with_unknown
from studies.store import Content, Stage, Store

HEAD_SIDE, SIDE = 128, 224  # of what the network sees: for heads, and as it is
LEFT_OUT = 20  # classes of Tiny-ImageNet that are unknown
UNKNOWN_SHIFT = "classes left out"
HIDDEN, BATCH = 512, 200  # of heads
BACKGROUND = "pictures of no class"


def tiny_imagenet(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return heads for 180 classes, of all seeds."""
    known, unknown = _known(files.tiny_imagenet("train"))
    test, beyond = _known(files.tiny_imagenet("val"))
    train, held_out = by_class(known, (study.pictures, study.pictures // 4), study.seed)
    (clean,) = by_class(test, (study.pictures // 6,), study.seed)
    (few,) = by_class(clean, (study.pictures // 12,), study.seed)
    (extra,) = by_class(unknown, (study.pictures // 2,), study.seed)
    others = _together(beyond, extra)
    plain = {TRAIN: train, HELD_OUT: held_out, CLEAN: clean, UNKNOWN_SHIFT: others}
    encode = _encoder(TINY_IMAGENET, plain, few, TINY, HEAD_SIDE, store)
    corrupted = _corrupted(TINY, study.severities[-1:])
    shifts = {CLEAN: CLEAN, **corrupted, UNKNOWN_SHIFT: "unknown classes"}
    return _heads(TINY_IMAGENET, encode, shifts, HIDDEN, study, store)


def caltech101(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return linear heads for all classes, of all seeds."""
    everything, beyond = files.caltech101(HEAD_SIDE)
    counts = (study.pictures // 2, study.pictures // 4, study.pictures // 6)
    train, held_out, clean = by_class(everything, counts, study.seed)
    others = beyond.take(shuffled(len(beyond.paths), study.seed).tolist()[: study.test // 2])
    plain = {TRAIN: train, HELD_OUT: held_out, CLEAN: clean, BACKGROUND: others}
    encode = _encoder(CALTECH, plain, clean, PHOTOGRAPHS, HEAD_SIDE, store)
    shifts = {
        **{CLEAN: CLEAN, BACKGROUND: "unknown classes"},
        **_corrupted(PHOTOGRAPHS, study.severities[-1:]),
    }
    return _heads(CALTECH, encode, shifts, 0, study, store)


def imagenet(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return the network as it is."""
    samples = files.imagenet_samples(SIDE)
    order = shuffled(len(samples.paths), study.seed).tolist()
    train, held_out, clean = (samples.take(order[i::3]) for i in range(3))
    tiny = files.tiny_imagenet("val")
    (some,) = by_class(tiny, (study.pictures // 12,), study.seed)
    of_imagenet = {name: k for k, name in enumerate(files.imagenet_names())}
    known = [of_imagenet.get(name, UNKNOWN) for name in files.tiny_names()]
    enlarged = Pictures(some.paths, tuple(known[k] for k in some.classes), some.side)
    shift = "Tiny-ImageNet, enlarged"
    plain = {TRAIN: train, HELD_OUT: held_out, CLEAN: clean, shift: enlarged}
    encode = _encoder(IMAGENET, plain, clean, {}, SIDE, store)
    return [Subject(IMAGENET, IMAGENET, 0, {CLEAN: CLEAN, shift: shift}, encode)]


def _known(pictures: Pictures) -> tuple[Pictures, Pictures]:
    """Tell pictures of known classes from those of the last ones in a random order."""
    order = shuffled(max(pictures.classes) + 1, 0).tolist()
    renamed = {old: new for new, old in enumerate(order[:-LEFT_OUT])}
    classes = [renamed.get(own, UNKNOWN) for own in pictures.classes]
    rows = range(len(classes))
    whole = Pictures(pictures.paths, tuple(classes), pictures.side)
    return (
        whole.take([row for row in rows if classes[row] != UNKNOWN]),
        whole.take([row for row in rows if classes[row] == UNKNOWN]),
    )


def _together(first: Pictures, second: Pictures) -> Pictures:
    return Pictures(first.paths + second.paths, first.classes + second.classes, first.side)


def _corrupted(
    corruptions: Mapping[str, Corruption], severities: tuple[int, ...]
) -> dict[str, str]:
    """Return shift -> its group."""
    return {f"{name} {s}": f"severity {s}" for s in severities for name in corruptions}


def _encoder(
    name: str,
    plain: Mapping[str, Pictures],
    test: Pictures,
    corruptions: Mapping[str, Corruption],
    side: int,
    store: Store,
) -> Callable[[str], Recorded]:
    """Return a function from a part to what the encoder makes of it."""

    @cache
    def encode(part: str) -> Recorded:
        if part in plain:
            return encoded(f"{name} {part}", plain[part], side, store)
        corruption, severity = part.rsplit(" ", 1)
        changed = corruptions[corruption], int(severity)
        return encoded(f"{name} {part}", test, side, store, *changed)

    return encode


def _heads(
    name: str,
    encode: Callable[[str], Recorded],
    shifts: Mapping[str, str],
    hidden: int,
    study: EvidenceStudy,
    store: Store,
) -> list[Subject]:
    def subject(seed: int) -> Subject:
        @cache
        def head() -> nn.Sequential:
            return _trained(name, encode(TRAIN), hidden, study.epochs, seed, store)

        def record(part: str) -> Recorded:
            own = _through(head(), encode(part))
            is_unknown = bool((own.labels == UNKNOWN).all())
            return with_unknown(_through(head(), encode(CLEAN)), own) if is_unknown else own

        return Subject(name, name, seed, shifts, record)

    return [subject(seed) for seed in study.seeds]


@torch.no_grad()
def _through(head: nn.Sequential, data: Recorded) -> Recorded:
    """Return what a head makes of an encoder's last features."""
    last = head[:-1](data.last)
    places = data.places if len(head) == 2 else {**data.places, "6 hidden layer": last}
    return Recorded(data.labels, head[-1](last), places)


def _trained(
    name: str, data: Recorded, hidden: int, epochs: int, seed: int, store: Store
) -> nn.Sequential:
    """Return a head with one or two layers on standardised features, as an artefact."""
    width, classes = data.last.shape[1], int(data.labels.max()) + 1
    layers = (nn.Linear(width, hidden), nn.ReLU()) if hidden else ()
    with seeded(seed):
        last = nn.Linear(hidden or width, classes)
        head = nn.Sequential(nn.BatchNorm1d(width, affine=False), *layers, last)

    def make(work: object) -> Content:
        del work
        with torch.enable_grad():
            _train(head, data, epochs, seed)
        return Content(head.state_dict())

    decided = (checksum(Labelled(data.last, data.labels)), hidden, epochs)
    head.load_state_dict(store.make(Stage(f"train {name}", decided, seed), make).load())
    return head.eval()


def _train(head: nn.Sequential, data: Recorded, epochs: int, seed: int) -> None:
    """Train by AdamW with a learning rate that falls along a cosine."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    head.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(data.labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(data.last[batch]), data.labels[batch]).backward()
            optimizer.step()
        schedule.step()
