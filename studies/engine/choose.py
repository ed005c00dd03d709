"""Knobs: chosen on held-out data alone, and swept to see what caution costs and gains."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar, final

from torch import nn

from acnml import Classifier, Map, metrics, tuning
from studies.engine.method import FIXED, TEMPERATURE, Method
from studies.engine.predict import frontier_of, predict_held_out, predict_sweep
from studies.engine.predictors import log_probs_of
from studies.engine.study import bins_for
from studies.engine.workshop import Workshop

T = TypeVar("T")
END = "end of grid"
ROUNDING = 1e-9  # so that a score that is equal to its limit is accepted


class HeldOut(NamedTuple):
    """How a method does on the held-out data."""

    accuracy: float
    nll: float


class LeastNll(NamedTuple):
    """The plain network's temperature of least held-out NLL, and that NLL."""

    temperature: float
    nll: float


class Chosen(NamedTuple):
    """A method with its knob set, and a remark where the choice is at an end of what was tried."""

    method: Method
    note: str = ""


class SweepPoint(NamedTuple):
    """One value of a family's knob: its held-out NLL, and ECE and NLL by shift."""

    family: Method
    method: Method  # with its knob and the temperature of its likelihood set
    held_out_nll: float
    ece: dict[str, float]
    nll: dict[str, float]


class ChoiceRule(ABC):
    """How a knob is chosen from the values that were tried."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What the rule is called in tables; empty where it need not be named."""

    @abstractmethod
    def choose(self, method: Method, workshop: Workshop) -> Chosen:
        """Return the method, which is prepared but for its knob, with the knob set."""


# Rules -----------------------------------------------------------------------------------------


def _tempers_the_network(method: Method, workshop: Workshop) -> bool:
    """Whether the knob is the temperature of the plain network, whose best value is searched."""
    return method.knob == TEMPERATURE and method.posterior == workshop.study.plain.posterior


@final
@dataclass(frozen=True)
class ByLeastNll(ChoiceRule):
    """The value of least held-out NLL in the grid.

    The temperature of the plain network is searched for instead.
    """

    label: str = "least NLL"

    def choose(self, method: Method, workshop: Workshop) -> Chosen:
        """Return the value of least NLL."""
        if _tempers_the_network(method, workshop):
            return Chosen(method.at(least_nll(workshop).temperature))
        values = workshop.study.values(method)
        nlls = [held_out(method.family.at(value), workshop).nll for value in values]
        best = nlls.index(min(nlls))
        return Chosen(method.at(values[best]), END if best in (0, len(values) - 1) else "")


@final
@dataclass(frozen=True)
class WithinPrice(ChoiceRule):
    """The most cautious value whose held-out NLL is at most `tolerance` above a reference.

    Attributes:
        tolerance: in nats.
        reference: workshop -> NLL that is compared with: `plain_nll`, `tempered_nll` or `nll_of`.
        label: in tables.
    """

    tolerance: float
    reference: Callable[[Workshop], float]
    label: str = ""

    def choose(self, method: Method, workshop: Workshop) -> Chosen:
        """Return the most cautious value within the price."""
        tried = workshop.study.values(method)
        found = {value: held_out(method.family.at(value), workshop).nll for value in tried}
        if _tempers_the_network(method, workshop):  # the best may be cheaper than all of the grid
            best = least_nll(workshop)
            found = dict(sorted({**found, best.temperature: best.nll}.items(), reverse=True))
        values, nlls = list(found), list(found.values())
        limit = self.reference(workshop) + self.tolerance
        if min(nlls) > limit:
            return Chosen(method.at(values[nlls.index(min(nlls))]), "none is in budget")
        value = most_cautious(values, nlls, limit)
        return Chosen(method.at(value), END if value in (values[0], values[-1]) else "")


@final
@dataclass(frozen=True)
class LargestHarmlessAlpha(ChoiceRule):
    """The paper's rule: the largest of its α that costs little accuracy and NLL, or else the least.

    Attributes:
        accuracy: what may be lost against the plain network.
        nll: what may be added to its NLL.
        label: in tables.
    """

    accuracy: float
    nll: float
    label: str = "paper’s α"

    def choose(self, method: Method, workshop: Workshop) -> Chosen:
        """Return the largest harmless α."""
        harmless = [a for a in tuning.PAPERS_ALPHAS if self.allows(method.at(a), workshop)]
        value = max(harmless, default=min(tuning.PAPERS_ALPHAS))
        end = END if value == max(tuning.PAPERS_ALPHAS) else ""
        return Chosen(method.at(value), end if harmless else "none is harmless")

    def allows(self, method: Method, workshop: Workshop) -> bool:
        """Whether a method, its knob set, costs no more than the rule allows."""
        assert method.value is not None  # it is set
        plain = held_out(workshop.study.plain, workshop)
        accuracy, nll = held_out(method.family.at(method.value), workshop)
        added = nll - plain.nll
        return (
            plain.accuracy - accuracy <= self.accuracy + ROUNDING and added <= self.nll + ROUNDING
        )


def plain_nll(workshop: Workshop) -> float:
    """Return the held-out NLL of the plain network."""
    return held_out(workshop.study.plain, workshop).nll


def tempered_nll(workshop: Workshop) -> float:
    """Return the held-out NLL of the plain network with its temperature of least NLL."""
    return least_nll(workshop).nll


def nll_of(method: Method) -> Callable[[Workshop], float]:
    """Return a function for the held-out NLL of a method at its chosen knob."""

    def reference(workshop: Workshop) -> float:
        ready = chosen(method, workshop)
        assert ready.value is not None  # it is chosen
        return held_out(ready.family.at(ready.value), workshop).nll

    return reference


# Choosing --------------------------------------------------------------------------------------


def chosen(method: Method, workshop: Workshop) -> Method:
    """Return a method with everything set, on held-out data where it has to be chosen."""
    return explained(method, workshop).method


def explained(method: Method, workshop: Workshop) -> Chosen:
    """Choose a method's knob, and say if the choice lies at an end of what was tried."""
    ready = prepared(method, workshop)
    if ready.choice == FIXED:
        return Chosen(ready)
    rule = workshop.study.choices[ready.choice]
    return _remembered(("chosen", ready), workshop, lambda: rule.choose(ready, workshop))


def prepared(method: Method, workshop: Workshop) -> Method:
    """Return a method with everything but its knob set: the likelihood's temperature, the scale."""
    if method.likelihood is None:
        found = least_nll(workshop).temperature
        # Exactly 1 means a likelihood that is not tempered, and gives the method another name.
        method = replace(method, likelihood=found if found != 1 else math.nextafter(1, 2))
    if method.scale is None:
        assert workshop.study.scale_from is not None  # a study whose methods need it names it
        method = replace(method, scale=chosen(workshop.study.scale_from, workshop).value)
    return method


def held_out(method: Method, workshop: Workshop) -> HeldOut:
    """Return how a method, its knob set, does on the held-out data."""

    def measure() -> HeldOut:
        log_probs = log_probs_of(predict_held_out(method, workshop).load())
        labels = workshop.data.held_out.labels
        return HeldOut(metrics.accuracy(log_probs, labels), metrics.nll(log_probs, labels))

    return _remembered(("held out", method), workshop, measure)


def least_nll(workshop: Workshop) -> LeastNll:
    """Return the plain network's temperature of least held-out NLL (Guo et al. 2017)."""

    def search() -> LeastNll:
        saved = log_probs_of(predict_held_out(workshop.study.plain, workshop).load())
        labels, as_saved = workshop.data.held_out.labels, Map(Classifier(nn.Identity()))
        found = tuning.temperature_by_nll(as_saved, [(saved, labels)], progress=False)
        temperature = rounded(found.value)
        return LeastNll(temperature, metrics.nll((saved / temperature).log_softmax(1), labels))

    return _remembered("least NLL", workshop, search)


def sweep_point(family: Method, value: float, workshop: Workshop) -> SweepPoint:
    """Measure one value of a family's knob on the held-out data and at the frontier's shifts."""
    method, frontier = prepared(family.family.at(value), workshop), frontier_of(workshop)
    log_probs = log_probs_of(predict_sweep(method, workshop).load())
    count = workshop.data.count(frontier.inputs)
    parts = dict(zip(frontier.shifts, log_probs.split(count), strict=True))
    labels, bins = workshop.data.labels(count), bins_for(count, workshop.study.bins)
    return SweepPoint(
        family.family,
        method,
        held_out(method, workshop).nll,
        {shift: metrics.ece(part, labels, bins) for shift, part in parts.items()},
        {shift: metrics.nll(part, labels) for shift, part in parts.items()},
    )


def _remembered(key: object, workshop: Workshop, find: Callable[[], T]) -> T:
    if key not in workshop.memory:
        workshop.memory[key] = find()
    found: T = workshop.memory[key]
    return found


# Sweeps ----------------------------------------------------------------------------------------


def rounded(value: float) -> float:
    """Keep four digits, so that a choice does not depend on the last bits of a sum."""
    return float(f"{value:.4g}")


def most_cautious(values: Sequence[float], nlls: Sequence[float], limit: float) -> float:
    """Return the most cautious value whose held-out NLL is at most the limit.

    The result lies between the first value within the limit and the more cautious one before it.
    There, log NLL is interpolated linearly in the logarithm of the value. Methods that are compared
    at the same limit therefore have nearly the same NLL, whatever their grids.

    Args:
        values: of a knob, the most cautious first.
        nlls: their NLLs, one of them within the limit; infinite if there is no solution.
        limit: the highest acceptable NLL.

    >>> most_cautious([1, 10, 100], [0.4, 0.1, 0.1], limit=0.2)
    3.162
    """
    inside = next(i for i, nll in enumerate(nlls) if nll <= limit)
    above, within = nlls[inside - 1], nlls[inside]
    if inside == 0 or math.isinf(above) or within <= 0:  # the logarithm cannot be interpolated
        return values[inside]
    share = math.log(above / limit) / math.log(above / within)
    low, high = sorted(values[inside - 1 : inside + 1])
    found = values[inside - 1] * (values[inside] / values[inside - 1]) ** share
    return min(max(rounded(found), low), high)


def up_to_least(nlls: Sequence[float]) -> int:
    """Return how many values of a sweep, the most cautious first, come up to its least NLL.

    Beyond it the same NLL occurs a second time, because of overconfidence: a path through both
    would compare caution with overconfidence.
    """
    return min(range(len(nlls)), key=lambda i: nlls[i], default=-1) + 1


def interpolated(path: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the height of a path at x, None outside of it.

    >>> interpolated([(0.0, 1.0), (2.0, 3.0)], 1.0)
    2.0
    """
    for (x0, y0), (x1, y1) in pairwise(path):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None
