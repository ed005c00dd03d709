"""Streams of rows whose distribution drifts: prices of electricity, and rain.

The first rows of a stream are for training and choosing, and to test what has not drifted: they
are mixed. The shift is the rest, in thirds: the later, the farther.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from studies import tabular
from studies.data import Labelled, shuffled
from studies.data.folder import DataError, data_folder
from studies.engine.study import checksum
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import STREAMS, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject
from studies.evidence.tabular_data import inputs_of, perceptron
from studies.store import Store

SOURCE = "https://github.com/scikit-multiflow/streaming-datasets"
NAMES = {"elec": "price of electricity", "weather": "rain"}
FIRST = 0.4  # of a stream, which is not shifted
LATER = ("soon", "later", "last")
MOST = 2000  # rows of a part


def streams(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return a multilayer perceptron for every stream and seed."""
    return [_subject(name, seed, store) for name in NAMES for seed in study.seeds]


def load(name: str) -> Labelled:
    """Return the rows of a stream in their order."""
    path = data_folder() / "streams" / f"{name}.csv"
    if not path.is_file():
        raise DataError(f"{path} is missing: take it from {SOURCE}")
    rows = np.loadtxt(path, delimiter=",", skiprows=1)
    return Labelled(torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1]).long())


def _subject(name: str, seed: int, store: Store) -> Subject:
    data = load(name)
    count = round(FIRST * len(data.labels))
    order, later = shuffled(count, seed), torch.arange(count, len(data.labels)).chunk(len(LATER))
    train, held_out, test = order.split([count // 2, count // 4, count - count // 2 - count // 4])
    clean = f"{CLEAN}, {NAMES[name]}"
    shifts = {f"{NAMES[name]}, {when}": "later rows" for when in LATER}
    rows = {TRAIN: train, HELD_OUT: held_out, clean: test, **dict(zip(shifts, later, strict=True))}

    @cache
    def fitted() -> Any:
        own = data.take(train)
        return tabular.classifier("mlp", seed).fit(own.inputs.numpy(), own.labels.numpy())

    def record(part: str) -> Recorded:
        every = -(-len(rows[part]) // MOST) if part != TRAIN else 1
        own = data.take(rows[part][::every])
        source = Source.of(own, lambda x: inputs_of(fitted(), x))
        decided = (checksum(data.take(train)), seed)
        return recorded(
            f"{STREAMS} {name} {part}", lambda: perceptron(fitted()), source, decided, store
        )

    return Subject(f"{STREAMS} {name}", STREAMS, seed, {clean: CLEAN, **shifts}, record)
