"""Accuracy without labels, and conformal sets, under every shift."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from acnml import conformal
from acnml.decisions import Outcomes, expected_accuracy
from studies.decisions.methods import (
    ACNML,
    CLOSED_FORM,
    DIFFERENCE,
    METHODS,
    TEMPERATURE,
    THRESHOLDED,
    Arrays,
    Fitted,
    difference,
    thresholded,
)

PLAIN, WEIGHTED = "plain", "weighted by the score"
COVERAGE = 0.9


class Estimated(NamedTuple):
    """An accuracy that was estimated without labels; an interval where there is one."""

    network: str
    seed: int
    shift: str
    group: str
    method: str
    n: int
    accuracy: float
    estimate: float
    low: float
    high: float
    error: float


class Widely(NamedTuple):
    """How far estimates of a method are off in a group of shifts: means over shifts and seeds."""

    network: str
    group: str
    method: str
    shifts: int
    error: float
    held: float  # share of intervals that hold the accuracy


class Sets(NamedTuple):
    """Conformal sets with a target coverage of 0.9."""

    network: str
    seed: int
    shift: str
    group: str
    method: str
    thresholds: str
    coverage: float
    size: float


def estimates(
    known: dict[str, Outcomes], new: dict[str, Outcomes], place: tuple[str, int, str, str]
) -> list[Estimated]:
    """Estimate the accuracy on new data in every way, from outcomes by method."""
    accuracy, n = float(new[TEMPERATURE].correct.double().mean()), len(new[TEMPERATURE].label)
    found = {}
    for method in METHODS:
        own = expected_accuracy(new[method].confidence, known[method])
        found[method] = own.accuracy, own.low, own.high
    warm, reference = new[TEMPERATURE].confidence, known[TEMPERATURE]
    for name, estimate in ((THRESHOLDED, thresholded), (DIFFERENCE, difference)):
        value = estimate(warm, reference)
        found[name] = value, value, value
    return [
        Estimated(*place, name, n, accuracy, *values, abs(values[0] - accuracy))
        for name, values in found.items()
    ]


def widely(rows: Sequence[Estimated]) -> list[Widely]:
    """Return the means of estimates by network, group and method."""
    by_place: dict[tuple[str, str, str], list[Estimated]] = {}
    for row in rows:
        by_place.setdefault((row.network, row.group, row.method), []).append(row)
    return [
        Widely(
            *place,
            shifts=len(own),
            error=statistics.fmean(row.error for row in own),
            held=statistics.fmean(row.low <= row.accuracy <= row.high for row in own),
        )
        for place, own in by_place.items()
    ]


def sets(fitted: Fitted, new: Arrays, place: tuple[str, int, str, str]) -> list[Sets]:
    """Make conformal sets for new data, with and without weights."""
    known, rows = fitted.labelled, []
    score = fitted.calibrators[ACNML].atypicality
    scores, new_scores = score(known.features), score(new.features)
    for method in (TEMPERATURE, ACNML, CLOSED_FORM):
        log_probs, own = (fitted.log_probs(method, data) for data in (known, new))
        plain = conformal.fit(log_probs, known.labels, COVERAGE).sets(own)
        weighted = conformal.fit_weighted(log_probs, known.labels, scores, new_scores, COVERAGE)
        both = {PLAIN: plain, WEIGHTED: weighted.sets(own, new_scores)}
        rows += [Sets(*place, method, name, *_measured(each, new)) for name, each in both.items()]
    return rows


def _measured(found: torch.Tensor, new: Arrays) -> tuple[float, float]:
    return conformal.coverage_of(found, new.labels), conformal.mean_size(found)
