"""Certified thresholds: how often they fail, and what they do under shift."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acnml.decisions import Outcomes, at_most_risk
from studies.decisions.methods import ACNML, METHODS, TEMPERATURE, Arrays, Fitted
from studies.decisions.settings import DecisionsStudy

CERTIFIED, PLUG_IN = "certified", "plug-in"
EQUAL_COVERAGE = "equal clean coverage"


class Failures(NamedTuple):
    """How often the true risk of a threshold is above its limit."""

    network: str
    seed: int
    method: str
    threshold: str
    risk: float
    resamples: int
    above: float  # share of the resamples
    coverage: float  # mean


class Automatic(NamedTuple):
    """What a threshold lets through."""

    network: str
    seed: int
    shift: str
    group: str
    method: str
    threshold: str
    coverage: float
    risk: float  # among the accepted; NaN if nothing is accepted
    wrong: float  # accepted and wrong, of all


def failures(
    network: str, seed: int, fitted: Fitted, clean: Arrays, study: DecisionsStudy
) -> list[Failures]:
    """Draw labelled data from all clean data again and again; these are the whole truth."""
    together = Arrays(*(torch.cat(p) for p in zip(fitted.labelled, clean, strict=True)))
    rows = []
    for method in (TEMPERATURE, ACNML):
        truth = fitted.outcomes(method, together)
        for risk in study.risks:
            generator = torch.Generator().manual_seed(seed)
            above, coverage = {CERTIFIED: 0, PLUG_IN: 0}, {CERTIFIED: 0.0, PLUG_IN: 0.0}
            for _ in range(study.resamples):
                drawn = torch.randint(len(truth.label), (study.labelled,), generator=generator)
                sure, right = truth.confidence[drawn], truth.correct[drawn]
                limits = {
                    CERTIFIED: at_most_risk(sure, right, risk, study.confidence).threshold,
                    PLUG_IN: plug_in(sure, right, risk),
                }
                for name, limit in limits.items():
                    accepted = truth.confidence >= limit
                    count = int(accepted.sum())
                    wrong = int((accepted & ~truth.correct).sum())
                    above[name] += wrong > risk * count
                    coverage[name] += count / len(accepted)
            n = study.resamples
            rows += [
                Failures(network, seed, method, name, risk, n, above[name] / n, coverage[name] / n)
                for name in above
            ]
    return rows


def plug_in(sureness: Tensor, correct: Tensor, risk: float) -> float:
    """Return the lowest threshold whose error rate on these data is at most the limit."""
    values, order = sureness.sort(descending=True)
    count = torch.arange(1, len(values) + 1)
    good = ((~correct[order]).cumsum(0) <= risk * count).nonzero().flatten()
    return float(values[good[-1]]) if len(good) else math.inf


def automatic(
    known: dict[str, Outcomes],
    new: dict[str, Outcomes],
    place: tuple[str, int, str, str],
    risk: float,
) -> list[Automatic]:
    """Apply every method's thresholds to new data, all outcomes by method."""
    certified = {m: at_most_risk(known[m].confidence, known[m].correct, risk) for m in METHODS}
    reference = certified[TEMPERATURE]
    share = 1 - reference.accepted / reference.examples
    rows = []
    for method in METHODS:
        equal = float(torch.quantile(known[method].confidence.double(), share))
        limits = {CERTIFIED: certified[method].threshold, EQUAL_COVERAGE: equal}
        for name, limit in limits.items():
            accepted = new[method].confidence >= limit
            coverage = float(accepted.double().mean())
            wrong = float((accepted & ~new[method].correct).double().mean())
            rate = wrong / coverage if coverage else math.nan
            rows.append(Automatic(*place, method, name, coverage, rate, wrong))
    return rows
