"""Scores, reliability diagrams and examples of predictions, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

from torch import Tensor

from acnml import metrics
from acnml.cli._shared.digits import Labelled, rotate

Predictions: TypeAlias = Mapping[str, Mapping[int, Tensor]]  # method -> angle -> log-probs (N, K)


class Scores(NamedTuple):
    """The scores of one method on one set of images."""

    accuracy: float
    confidence: float  # mean probability of the predicted class
    nll: float
    ece: float
    brier: float


class Bin(NamedTuple):
    """A point of a reliability diagram."""

    confidence: float
    accuracy: float


class View(NamedTuple):
    """One image at one angle, with every method's prediction and its confidence."""

    angle: int
    pixels: tuple[tuple[float, ...], ...]
    predictions: Mapping[str, tuple[int, float]]


class Example(NamedTuple):
    """One test image at several angles."""

    label: int
    views: tuple[View, ...]


def score(log_probs: Tensor, labels: Tensor, bins: int) -> Scores:
    """Score predictions against labels."""
    return Scores(
        accuracy=metrics.accuracy(log_probs, labels),
        confidence=log_probs.double().amax(1).exp().mean().item(),
        nll=metrics.nll(log_probs, labels),
        ece=metrics.ece(log_probs, labels, bins),
        brier=metrics.brier(log_probs, labels),
    )


def diagram(log_probs: Tensor, labels: Tensor, bins: int) -> tuple[Bin, ...]:
    """Return accuracy against confidence, in bins of equal mass."""
    reliability = metrics.reliability(log_probs, labels, bins)
    pairs = zip(reliability.confidence.tolist(), reliability.accuracy.tolist(), strict=True)
    return tuple(Bin(*pair) for pair in pairs)


def first_different(
    predictions: Predictions, test: Labelled, angles: Iterable[int], count: int = 3
) -> tuple[Example, ...]:
    """Return the first test images of different digits, so that none is picked by hand."""
    first = {int(label): index for index, label in reversed(list(enumerate(test.labels)))}
    indices = islice(sorted(first.values()), count)
    return tuple(_example(predictions, test, angles, index) for index in indices)


def _example(
    predictions: Predictions, test: Labelled, angles: Iterable[int], index: int
) -> Example:
    views = []
    for angle in angles:
        pixels = rotate(test.inputs[index, 0], angle).tolist()
        rows = {method: by_angle[angle][index].exp() for method, by_angle in predictions.items()}
        top = {method: (int(row.argmax()), row.max().item()) for method, row in rows.items()}
        views.append(View(angle, tuple(map(tuple, pixels)), top))
    return Example(int(test.labels[index]), tuple(views))
