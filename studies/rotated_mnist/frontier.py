"""Knobs: chosen on validation images alone, and swept to see what caution costs and buys."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import nn

from acnml import Classifier, Map, metrics, tuning
from studies.rotated_mnist.methods import FIXED, LEAST_NLL, MAP, Method
from studies.rotated_mnist.predict import predict_sweep, predict_validation
from studies.rotated_mnist.workshop import Workshop
from studies.study.choices import most_cautious, rounded
from studies.study.knobs import sweep_values
from studies.study.saved import log_probs_of


class SweepPoint(NamedTuple):
    """One value of a family's knob: its price upright, and what every shift is like with it."""

    family: Method
    value: float
    validation_nll: float
    ece: dict[str, float]  # by shift
    nll: dict[str, float]


def chosen(method: Method, workshop: Workshop) -> Method:
    """Return a method with its knob set, on validation images where it has to be chosen."""
    if method.choice == FIXED:
        return method
    values = sweep_values(method.knob, workshop.study.frontier)
    if method.choice == LEAST_NLL:
        return method.at(_temperature_of_least_nll(workshop))
    nlls = [validation_nll(method.family.at(value), workshop) for value in values]
    budget = validation_nll(MAP, workshop) + workshop.study.choice.tolerance
    return method.at(most_cautious(values, nlls, budget))


@lru_cache(maxsize=1024)  # a choice looks at the same few for every shift
def validation_nll(method: Method, workshop: Workshop) -> float:
    """Return the NLL on validation images."""
    log_probs = log_probs_of(predict_validation(method, workshop).load())
    return metrics.nll(log_probs, workshop.data.validation.labels)


def sweep_point(family: Method, value: float, workshop: Workshop) -> SweepPoint:
    """Measure one value of a family's knob on validation images and on the frontier's."""
    method, frontier = family.family.at(value), workshop.study.frontier
    log_probs = log_probs_of(predict_sweep(method, workshop).load())
    count = workshop.data.count(frontier.images)
    parts = dict(zip(frontier.shifts, log_probs.split(count), strict=True))
    labels = workshop.data.test.labels[:count]
    return SweepPoint(
        method,
        value,
        validation_nll(method, workshop),
        {s: metrics.ece(p, labels, workshop.study.bins) for s, p in parts.items()},
        {s: metrics.nll(p, labels) for s, p in parts.items()},
    )


def _temperature_of_least_nll(workshop: Workshop) -> float:
    """Return the plain network's temperature of least validation NLL, as usual (Guo et al.)."""
    saved = predict_validation(MAP, workshop).load()
    batch = [(log_probs_of(saved), workshop.data.validation.labels)]
    as_saved = Map(Classifier(nn.Identity()))
    return rounded(tuning.temperature_by_nll(as_saved, batch, progress=False).value)
