"""Who is better than whom: means over shifts and seeds, differences with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from scipy import stats

from studies.engine.tables import mean, select
from studies.evidence.measures import Interval, Scored
from studies.evidence.methods import ACNML, DAC, DENSITY, EQUAL, OTHER_FORMS, PLAIN, TEMPERATURE
from studies.evidence.settings import PRICE
from studies.evidence.study import Evidence, Known
from studies.evidence.subjects import CLEAN
from studies.evidence.views import AS_THEY_ARE

BEFORE = OTHER_FORMS[AS_THEY_ARE]  # the default of `calibrate` before features were scaled
RIVALS = (EQUAL, DAC, DENSITY[2], ACNML[2], BEFORE)
SCORES = ("ece", "nll")


class Mean(NamedTuple):
    """A method in a group of shifts at a price: means over shifts and seeds."""

    network: str
    group: str
    price: float
    method: str
    shifts: int
    seeds: int
    accuracy: float
    nll: float
    brier: float
    ece: float
    ece_deviation: float  # over seeds
    nll_deviation: float


class Comparison(NamedTuple):
    """A method minus a rival in a group of shifts, at `PRICE`; negative is better.

    The interval of 95 % is over test inputs, not over networks. A shift of one network is won if
    the score is lower than the rival's, and surely won if its own interval is below 0.
    """

    network: str
    group: str
    method: str
    rival: str
    score: str
    mean: float
    low: float
    high: float
    shifts: int  # times seeds
    won: int
    surely_won: int
    lost: int
    surely_lost: int

    @property
    def interval(self) -> Interval:
        """The mean with its ends."""
        return Interval(self.mean, self.low, self.high)

    @property
    def counts(self) -> str:
        """Shifts won and lost, in brackets those that are certain."""
        return f"{self.won} ({self.surely_won}) : {self.lost} ({self.surely_lost})"


class Cases(NamedTuple):
    """How often a method is better than a rival over networks with their groups of shifts."""

    method: str
    rival: str
    score: str
    won: int
    lost: int
    mean: float  # difference


class Correlation(NamedTuple):
    """Spearman's rank correlation of the gain under shift with what clean data tell."""

    known: str
    score: str
    correlation: float
    networks: int


def groups(rows: Sequence[Scored]) -> list[tuple[str, str]]:
    """Return all networks with their groups of shifts."""
    return list(dict.fromkeys((r.network, r.group) for r in rows if r.group != CLEAN))


def means(rows: Sequence[Scored]) -> list[Mean]:
    """Return the means over shifts and seeds, method by method."""
    by_place: dict[tuple[str, str, float, str], list[Scored]] = {}
    for row in rows:
        by_place.setdefault((row.network, row.group, row.price, row.method), []).append(row)
    return [_mean(own) for own in by_place.values()]


def _mean(rows: Sequence[Scored]) -> Mean:
    first = rows[0]
    seeds = dict.fromkeys(row.seed for row in rows)
    return Mean(
        *(first.network, first.group, first.price, first.method),
        len({(row.subject, row.shift) for row in rows}),
        len(seeds),
        *(mean(rows, score) for score in ("accuracy", "nll", "brier", "ece")),
        *(_deviation([mean(select(rows, seed=s), score) for s in seeds]) for score in SCORES),
    )


def _deviation(values: Sequence[float]) -> float:
    return float(torch.tensor(values).std()) if len(values) > 1 else math.nan


def compared(evidence: Evidence, rows: Sequence[Scored], rival: str, score: str) -> Comparison:
    """Compare some rows of a method with those of a rival at the same shifts."""
    number = SCORES.index(score)
    differences, draws = [], []
    for row in rows:
        place = (row.subject, row.seed, row.shift)
        other = evidence.by_key[(*place, PRICE, rival)]
        differences.append(getattr(row, score) - getattr(other, score))
        own, its = (evidence.resampled[(*place, m)][number] for m in (row.method, rival))
        draws.append((own - its).double())
    single = [Interval.of(d, drawn) for d, drawn in zip(differences, draws, strict=True)]
    whole = Interval.of(sum(differences) / len(rows), torch.stack(draws).mean(0))
    first = rows[0]
    return Comparison(
        *(first.network, first.group, first.method, rival, score),
        *whole,
        len(rows),
        won=sum(each.mean < 0 for each in single),
        surely_won=sum(each.high < 0 for each in single),
        lost=sum(each.mean > 0 for each in single),
        surely_lost=sum(each.low > 0 for each in single),
    )


def comparisons(evidence: Evidence) -> list[Comparison]:
    """Compare all methods with all rivals, group by group."""
    found = []
    at_price = select(evidence.rows, price=PRICE)
    for network, group in groups(at_price):
        inside = select(at_price, network=network, group=group)
        scores = ("ece",) if any(math.isnan(row.nll) for row in inside) else SCORES
        for method in dict.fromkeys(row.method for row in inside):
            if method in (PLAIN, TEMPERATURE):
                continue
            own = select(inside, method=method)
            found += [
                compared(evidence, own, rival, score)
                for rival in RIVALS
                if rival != method
                for score in scores
            ]
    return found


def cases(found: Sequence[Comparison]) -> list[Cases]:
    """Count networks with their groups of shifts in which the mean of a method is lower."""
    counted = []
    for method, rival, score in dict.fromkeys((o.method, o.rival, o.score) for o in found):
        own = select(found, method=method, rival=rival, score=score)
        won, lost = sum(o.mean < 0 for o in own), sum(o.mean > 0 for o in own)
        counted.append(Cases(method, rival, score, won, lost, mean(own, "mean")))
    return counted


def correlations(known: Sequence[Known], found: Sequence[Mean], default: str) -> list[Correlation]:
    """Correlate the gain over a temperature of equal price with what clean data tell."""
    at_price = select(found, price=PRICE)
    gains: dict[str, dict[str, float]] = {score: {} for score in SCORES}
    for score in SCORES:
        for network in dict.fromkeys(one.network for one in known):
            own, plain = (select(at_price, network=network, method=m) for m in (default, EQUAL))
            pairs = [(getattr(a, score), getattr(b, score)) for a, b in zip(own, plain, strict=True)
                     if a.group != CLEAN]  # fmt: skip
            differences = [b - a for a, b in pairs if not math.isnan(a)]
            if differences:
                gains[score][network] = sum(differences) / len(differences)
    columns: dict[str, Callable[[Known], float]] = {
        "classes": lambda one: one.classes,
        "temperature": lambda one: one.temperature,
        "accuracy": lambda one: one.accuracy,
        "spread of the score": lambda one: one.spread,
        "score finds errors": lambda one: one.errors,
        "α": lambda one: one.alpha,
    }
    return [
        _correlated(name, score, column, known, gains[score])
        for score in SCORES
        for name, column in columns.items()
    ]


def _correlated(
    name: str,
    score: str,
    column: Callable[[Known], float],
    known: Sequence[Known],
    gains: dict[str, float],
) -> Correlation:
    of_network = [
        sum(column(one) for one in own) / len(own)
        for network in gains
        for own in [select(known, network=network)]
    ]
    enough = len(gains) > 2
    found = stats.spearmanr(of_network, list(gains.values())).statistic if enough else math.nan
    return Correlation(name, score, float(found), len(gains))
