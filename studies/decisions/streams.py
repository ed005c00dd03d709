"""Data in the order of time: a reference, a quiet time that is like it, and what comes then."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from acnml import Calibrator, calibrate
from studies.data import Labelled, split
from studies.data.catalogue import STREAMS
from studies.data.folder import read
from studies.decisions.methods import ACNML, TEMPERATURE, Arrays, Fitted
from studies.decisions.settings import CORRUPTED, ELEC, TURNING, WEATHER
from studies.decisions.training import trained

HIDDEN = (32,)

# The first rows of a stream are shuffled: half train, a quarter calibrates, a quarter is quiet.
EARLY = 0.4


@final
@dataclass(frozen=True, eq=False)
class Stream:
    """Answers in the order of time.

    Attributes:
        name: of the stream.
        calibrator: whose outcomes are the reference.
        temperature: the confidences (N,) of a temperature.
        data: logits, features and labels.
        quiet: how many of them come before the change.
    """

    name: str
    calibrator: Calibrator
    temperature: Tensor
    data: Arrays
    quiet: int


def tables(name: str) -> Stream:
    """Return a table in the order of time, with a small network that was trained on its begin."""
    table = load_table(name)
    early = int(EARLY * len(table.labels))
    quarter = early // 4
    sizes = (early - 2 * quarter, quarter, quarter)
    train, validation, quiet = split(table.first(early), sizes, seed=0)
    late = table.take(torch.arange(early, len(table.labels)))
    mean, scale = train.inputs.mean(0), train.inputs.std(0)
    network = trained((train.inputs - mean) / scale, train.labels, HIDDEN, seed=0)

    def scaled(data: Labelled) -> tuple[Tensor, Tensor]:
        return (data.inputs - mean) / scale, data.labels

    calibrated = calibrate(network, scaled(train), scaled(validation), progress=False)
    x, labels = (torch.cat(p) for p in zip(scaled(quiet), scaled(late), strict=True))
    with torch.no_grad():
        logits = network(x)
    warm = torch.softmax(logits / calibrated.temperature, -1).amax(-1)
    data = Arrays(logits, calibrated.features(x), labels)
    return Stream(name, calibrated.calibrator, warm, data, len(quiet.labels))


def load_table(name: str) -> Labelled:
    """Return a table of the data folder; the last column is the class."""
    files = {file.name: file for file in STREAMS.files}
    text = read(STREAMS, files[f"{name}.csv"]).decode()
    _, *rows = csv.reader(io.StringIO(text))
    values = torch.from_numpy(np.array(rows, dtype=np.float64)).float()
    return Labelled(values[:, :-1], values[:, -1].long())


def images(
    name: str,
    fitted: Fitted,
    load: Callable[[str], Arrays],
    order: Mapping[str, tuple[str, ...]],
) -> Iterator[Stream]:
    """Return held-out images, then shifted test images; a stream for every list of shifts.

    Test images are not used for the quiet time: those of MNIST are easier than its training images.
    """
    calibrator, quiet = fitted.calibrators[ACNML], fitted.labelled
    for label, shifts in order.items():
        parts = [quiet, *map(load, shifts)]
        data = Arrays(*(torch.cat(part) for part in zip(*parts, strict=True)))
        warm = fitted.log_probs(TEMPERATURE, data).amax(-1).exp()
        yield Stream(f"{name}: {label}", calibrator, warm, data, len(quiet.labels))


TABLES: Mapping[str, Callable[[], Stream]] = {
    ELEC: lambda: tables(ELEC),
    WEATHER: lambda: tables(WEATHER),
}
OF_NETWORK = {TURNING: "digits", CORRUPTED: "resnet20"}
