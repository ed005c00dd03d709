"""Knobs: chosen on held-out images alone, and swept to see what caution costs and buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from torch import nn

from acnml import Classifier, Map, metrics, tuning
from studies.cifar10_c.methods import (
    BMA_KFAC,
    FIXED,
    LEAST_NLL,
    MAP_SWA,
    NEAR,
    PAPERS,
    Method,
    choice_values,
)
from studies.cifar10_c.predict import frontier_images, predict_held_out, predict_sweep
from studies.cifar10_c.workshop import Workshop
from studies.study.choices import most_cautious, rounded
from studies.study.knobs import TEMPERATURE
from studies.study.saved import log_probs_of


class HeldOut(NamedTuple):
    """How a method does on the held-out images."""

    accuracy: float
    nll: float


class LeastNll(NamedTuple):
    """The temperature of least NLL, and the NLL that SWA has with it."""

    temperature: float
    nll: float


class SweepPoint(NamedTuple):
    """One value of a family's knob: its price on clean images, and ECE and NLL corrupted."""

    family: Method
    method: Method  # its value, and the temperature of its likelihood, set
    held_out_nll: float
    ece: float  # means over corruptions
    nll: float


def chosen(method: Method, workshop: Workshop) -> Method:
    """Return a method with its knob set, on held-out images where it has to be chosen."""
    method = prepared(method, workshop)
    if method.choice == FIXED:
        return method
    if method.choice == LEAST_NLL and method.knob == TEMPERATURE:
        return method.at(least_nll(workshop).temperature)
    values = choice_values(method, workshop.study)
    if method.choice == PAPERS:
        return method.at(largest_harmless(method, workshop))
    nlls = [held_out(method.family.at(value), workshop).nll for value in values]
    if method.choice == LEAST_NLL:
        return method.at(values[nlls.index(min(nlls))])
    return method.at(most_cautious(values, nlls, budget(method, workshop)))


class Chosen(NamedTuple):
    """A method with its knob set, and what is to be said about the choice."""

    method: Method
    note: str


def explained(method: Method, workshop: Workshop) -> Chosen:
    """Choose a method's knob, and say if the choice lies at an end of what was tried."""
    ready = chosen(method, workshop)
    if method.choice == PAPERS:
        harmless = is_harmless(ready, workshop)
        return Chosen(ready, "" if harmless else "none is harmless")
    if method.choice == LEAST_NLL and method.knob == TEMPERATURE:
        return Chosen(ready, "")  # found by a search
    values = choice_values(method, workshop.study)
    if method.choice != LEAST_NLL and not _in_budget(method, values, workshop):
        return Chosen(ready, "none is in budget")
    ends = ready.value in (values[0], values[-1])
    return Chosen(ready, "end of grid" if ends else "")


def _in_budget(method: Method, values: Sequence[float], workshop: Workshop) -> bool:
    """Whether any value costs no more than the method may."""
    family, allowed = prepared(method, workshop).family, budget(method, workshop)
    return any(held_out(family.at(value), workshop).nll <= allowed for value in values)


def prepared(method: Method, workshop: Workshop) -> Method:
    """Return a method with all but its knob found: the likelihood's temperature, the scale."""
    if method.likelihood is None:
        method = replace(method, likelihood=least_nll(workshop).temperature)
    if method.scale is None:
        method = replace(method, scale=chosen(BMA_KFAC, workshop).value)
    return method


def budget(method: Method, workshop: Workshop) -> float:
    """Return the held-out NLL that a method may have."""
    rules = workshop.study.choice
    if method.choice == NEAR:
        return least_nll(workshop).nll + rules.near
    return held_out(MAP_SWA, workshop).nll + rules.tolerance


def largest_harmless(method: Method, workshop: Workshop) -> float:
    """Return the largest of the paper's α that hardly costs accuracy or NLL, or else the least."""
    harmless = (alpha for alpha in tuning.PAPERS_ALPHAS if is_harmless(method.at(alpha), workshop))
    return max(harmless, default=min(tuning.PAPERS_ALPHAS))


def is_harmless(method: Method, workshop: Workshop) -> bool:
    """Whether a method, its knob set, costs no more against SWA than the study allows."""
    rules, plain = workshop.study.choice, held_out(MAP_SWA, workshop)
    assert method.value is not None  # it is set
    accuracy, nll = held_out(method.family.at(method.value), workshop)
    tolerance = tuning.Tolerance(rules.accuracy, rules.nll)
    return tolerance.allows(plain.accuracy - accuracy, nll - plain.nll)


@lru_cache(maxsize=4096)  # a choice looks at the same few for every shift
def held_out(method: Method, workshop: Workshop) -> HeldOut:
    """Return how a method, its knob set, does on held-out images."""
    log_probs = log_probs_of(predict_held_out(method, workshop).load())
    labels = workshop.data.held_out.labels
    return HeldOut(metrics.accuracy(log_probs, labels), metrics.nll(log_probs, labels))


@lru_cache(maxsize=64)
def least_nll(workshop: Workshop) -> LeastNll:
    """Return SWA's temperature of least held-out NLL, as usual (Guo et al. 2017), and that NLL."""
    saved = log_probs_of(predict_held_out(MAP_SWA, workshop).load())
    labels, as_saved = workshop.data.held_out.labels, Map(Classifier(nn.Identity()))
    found = tuning.temperature_by_nll(as_saved, [(saved, labels)], progress=False)
    temperature = rounded(found.value)
    return LeastNll(temperature, metrics.nll((saved / temperature).log_softmax(1), labels))


def sweep_point(family: Method, value: float, workshop: Workshop) -> SweepPoint:
    """Measure one value of a family's knob on held-out images and on the frontier's."""
    method = prepared(family.family.at(value), workshop)
    log_probs = log_probs_of(predict_sweep(method, workshop).load())
    count = frontier_images(workshop)
    parts, labels = log_probs.split(count), workshop.data.labels(count)
    return SweepPoint(
        family.family,
        method,
        held_out(method, workshop).nll,
        fmean(metrics.ece(part, labels, workshop.study.bins) for part in parts),
        fmean(metrics.nll(part, labels) for part in parts),
    )
