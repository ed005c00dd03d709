"""The order of the work, as plain data: what matters most and costs least comes first.

`run` does what is listed here, and the plan of a dry run counts it.
"""

from __future__ import annotations

from typing import NamedTuple

from studies.cifar10_c.methods import (
    CHEAP,
    COSTLY,
    MAP_SWA,
    NETWORK_WIDE,
    SWEPT,
    TRIED,
    Method,
    choice_values,
    methods_of,
)
from studies.cifar10_c.study import CLEAN, Cifar10CStudy
from studies.study.knobs import sweep_values

HELD_OUT, FRONTIER = "held out", "frontier"


class Job(NamedTuple):
    """One prediction: a method sees a shift, the held-out images, or those of the frontier."""

    method: Method
    where: str
    value: float | None = None  # of the knob; None takes the chosen one


class Phase(NamedTuple):
    """Jobs that belong together, for some seeds."""

    title: str
    jobs: tuple[Job, ...]
    seeds: tuple[int, ...]


def phases(study: Cifar10CStudy) -> tuple[Phase, ...]:
    """Return all predictions of a study, in their order."""
    methods = methods_of(study)
    cheap, wide, costly = (
        [m for m in group if m in methods] for group in (CHEAP, NETWORK_WIDE, COSTLY)
    )
    every = study.seeds
    return (
        Phase("choices on held-out images", tuple(_choices(study)), every),
        Phase("in distribution", _seen([*cheap, *wide], (CLEAN,)), every),
        Phase("corruptions, cheap methods", _seen(cheap, study.shifts[1:]), every),
        Phase("frontier", tuple(_sweeps(study)), every[:1]),
        *(
            Phase(
                f"severity {severity}, network-wide", _seen(wide, study.shifts_at(severity)), every
            )
            for severity in study.severities
        ),
        Phase("the paper's gradient steps", _seen(costly, study.shifts), every),
    )


def _choices(study: Cifar10CStudy) -> list[Job]:
    """Try all values that a knob is chosen from."""
    tried = [Job(f.family, HELD_OUT, value) for f in TRIED for value in choice_values(f, study)]
    return [Job(MAP_SWA, HELD_OUT, MAP_SWA.value), *tried]


def _sweeps(study: Cifar10CStudy) -> list[Job]:
    """Turn the knob of every family."""
    return [
        Job(f.family, FRONTIER, value)
        for f in SWEPT
        for value in sweep_values(f.knob, study.frontier)
    ]


def _seen(methods: list[Method], shifts: tuple[str, ...]) -> tuple[Job, ...]:
    """Let methods see shifts; one method after the other, which has to be built once only."""
    return tuple(Job(method, shift) for method in methods for shift in shifts)
