"""Who is better than whom: mean differences with bootstrap intervals, shifts won, cases won."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from studies.engine.tables import mean, select
from studies.evidence.measures import Interval, Scored, is_missing
from studies.evidence.methods import ACNML, DENSITY, EQUAL, PLAIN, TEMPERATURE, WEIGHED
from studies.evidence.study import Evidence
from studies.evidence.subjects import CLEAN

RIVALS = (EQUAL, DENSITY, ACNML, WEIGHED)


class Comparison(NamedTuple):
    """A method minus a rival in a group of shifts, at one price; negative is better.

    The interval of 95 % is over test inputs, not over networks. A shift of one network is won if
    the score is lower than the rival's, and surely won if its own interval is below 0.
    """

    network: str
    group: str
    price: float
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


def priced(rows: Sequence[Scored]) -> list[str]:
    """Return the methods that have a price, in their order."""
    methods = dict.fromkeys(row.method for row in rows)
    return [method for method in methods if method not in (PLAIN, TEMPERATURE)]


def groups(rows: Sequence[Scored]) -> list[tuple[str, str]]:
    """Return all networks with their groups of shifts."""
    return list(dict.fromkeys((r.network, r.group) for r in rows if r.group != CLEAN))


def compared(evidence: Evidence, rows: Sequence[Scored], rival: str, score: str) -> Comparison:
    """Compare some rows of a method with those of a rival at the same shifts."""
    differences, draws = [], []
    for row in rows:
        place = (row.network, row.seed, row.shift, row.price)
        other = evidence.by_key[(*place, rival)]
        differences.append(getattr(row, score) - getattr(other, score))
        own, its = (evidence.resampled[(*place, m, score)] for m in (row.method, rival))
        draws.append((own - its).double())
    single = [Interval.of(d, drawn) for d, drawn in zip(differences, draws, strict=True)]
    whole = Interval.of(sum(differences) / len(rows), torch.stack(draws).mean(0))
    first = rows[0]
    return Comparison(
        *(first.network, first.group, first.price, first.method, rival, score),
        *whole,
        len(rows),
        won=sum(each.mean < 0 for each in single),
        surely_won=sum(each.high < 0 for each in single),
        lost=sum(each.mean > 0 for each in single),
        surely_lost=sum(each.low > 0 for each in single),
    )


def comparisons(evidence: Evidence, prices: Sequence[float]) -> list[Comparison]:
    """Compare all methods with all rivals, group by group and price by price."""
    found = []
    for network, group in groups(evidence.rows):
        inside = select(evidence.rows, network=network, group=group)
        scores = ("ece",) if any(is_missing(row.nll) for row in inside) else ("ece", "nll", "brier")
        for price in prices:
            for method in priced(inside):
                own = select(inside, price=price, method=method)
                found += [
                    compared(evidence, own, rival, score)
                    for rival in RIVALS
                    if rival != method
                    for score in scores
                ]
    return found


class Cases(NamedTuple):
    """In how many cases the mean of a method is lower than a rival's.

    A case is a network with a group of shifts and a price.
    """

    networks: str
    method: str
    rival: str
    score: str
    lower: int
    cases: int


def cases(found: Sequence[Comparison], families: dict[str, Sequence[str]]) -> list[Cases]:
    """Count cases for several families of networks."""
    counted = []
    for name, networks in families.items():
        inside = [one for one in found if one.network in networks]
        for method, rival, score in dict.fromkeys((o.method, o.rival, o.score) for o in inside):
            own = select(inside, method=method, rival=rival, score=score)
            lower = sum(one.mean < 0 for one in own)
            counted.append(Cases(name, method, rival, score, lower, len(own)))
    return counted


def seed_means(rows: Sequence[Scored], score: str) -> list[float]:
    """Return the mean over shifts for every seed."""
    seeds = dict.fromkeys(row.seed for row in rows)
    return [mean(select(rows, seed=seed), score) for seed in seeds]
