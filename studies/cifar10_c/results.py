"""What the study has found so far, as plain numbers, read from saved predictions alone.

Scores are taken on several numbers of images, always the first of one order: calibration errors are
comparable only for the same images, and some methods see fewer than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from statistics import fmean, stdev
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml import metrics
from studies.cifar10_c.choices import Chosen, SweepPoint, chosen, explained, sweep_point
from studies.cifar10_c.data import StudyData
from studies.cifar10_c.methods import (
    COSTLY,
    LINEARISED,
    SWEPT,
    Method,
    images_of,
    methods_of,
)
from studies.cifar10_c.predict import predict_shift
from studies.cifar10_c.study import BLUR, CLEAN, Cifar10CStudy, shift
from studies.cifar10_c.unsolved import UNSOLVED
from studies.cifar10_c.workshop import Workshop
from studies.study.artefacts import Artefacts, Gathering
from studies.study.knobs import sweep_values
from studies.study.saved import log_probs_of
from studies.study.scores import Diagram, Row, diagram

STUDY = "cifar10-c"


class Agreement(NamedTuple):
    """How far the paper's steps are from the linearised solution, over all shifts."""

    method: Method
    images: int
    total_variation: float  # mean
    same: float  # share of images with the same prediction


class Unsolved(NamedTuple):
    """How many predictions a method has left unsolved, over all shifts and seeds."""

    method: Method
    images: int
    of: int


@final
@dataclass(frozen=True, eq=False)
class Results:
    """All that tables, figures and the report are made of."""

    study: Cifar10CStudy
    data: StudyData
    rows: tuple[Row[Method], ...]
    errors: dict[tuple[str, str], float]  # bootstrap std by method's name and score, clean images
    diagrams: dict[tuple[str, str], Diagram]  # by method's name and shift
    agreements: tuple[Agreement, ...]
    sweep: tuple[SweepPoint, ...]
    chosen: tuple[Chosen, ...]  # knobs of the first seed
    unsolved: tuple[Unsolved, ...]  # where there is any
    missing: tuple[str, ...]  # what is not finished

    @cached_property
    def _places(self) -> dict[tuple[str, str, int], list[Row[Method]]]:
        """The rows of all seeds, by method's name, shift and number of images."""
        places: dict[tuple[str, str, int], list[Row[Method]]] = {}
        for row in self.rows:
            places.setdefault((row.method.name, row.shift, row.n), []).append(row)
        return places

    def values(self, method: Method, score: str, shift: str, n: int) -> list[float]:
        """Return a score of a method on the first n images of a shift, for every seed.

        Empty while a seed is missing: a mean over fewer seeds than others have compares unlike.
        """
        rows = self._places.get((method.name, shift, n), [])
        whole = len(rows) == len(self.study.seeds)
        return [float(getattr(row, score)) for row in rows] if whole else []

    def at_severity(self, method: Method, score: str, severity: int, n: int) -> list[float]:
        """Return a score for every corruption, the mean over seeds; empty if one is missing."""
        shifts = [shift(name, severity) for name in self.study.corruptions]
        each = [self.values(method, score, s, n) for s in (shifts if severity else [CLEAN])]
        return [fmean(values) for values in each] if all(each) else []

    def level(self, images: int) -> int:
        """Return how many test images there are when so many are asked for."""
        return self.data.count(images)


def collect(study: Cifar10CStudy, data: StudyData, artefacts: Artefacts) -> Results:
    """Gather what is finished, and note what is not."""
    workshops = [Workshop(study, data, artefacts, seed) for seed in study.seeds]
    first, found, methods = workshops[0], Gathering(), methods_of(study)
    sweep = (
        (family, value) for family in SWEPT for value in sweep_values(family.knob, study.frontier)
    )
    return Results(
        study,
        data,
        rows=tuple(chain(*found.each(_rows, product(workshops, methods, study.shifts)))),
        errors=dict(chain(*found.each(_errors, product([first], methods)))),
        diagrams=_diagrams(workshops, methods, found),
        agreements=found.each(_agreement, product([first], COSTLY)),
        sweep=found.each(sweep_point, ((*point, first) for point in sweep)),
        chosen=found.each(explained, ((m, first) for m in methods if m.value is None)),
        unsolved=tuple(_unsolved(workshops, methods, found)),
        missing=tuple(found.missing),
    )


def levels(method: Method, where: str, study: Cifar10CStudy, data: StudyData) -> list[int]:
    """Return the numbers of images on which a method is scored at a shift, its own the first."""
    own = data.count(images_of(method, where, study), where)
    shared = (study.images.network_wide, study.images.beside)
    return sorted({own, *(data.count(n, where) for n in shared if n < own)}, reverse=True)


def _log_probs(workshop: Workshop, method: Method, where: str) -> Tensor:
    return log_probs_of(predict_shift(chosen(method, workshop), where, workshop).load())


def _rows(workshop: Workshop, method: Method, where: str) -> list[Row[Method]]:
    ready = chosen(method, workshop)
    artefact = predict_shift(ready, where, workshop)
    log_probs = log_probs_of(artefact.load())
    return [
        Row(
            ready,
            workshop.seed,
            where,
            n,
            **metrics.summary(log_probs[:n], workshop.data.labels(n), workshop.study.bins),
            seconds_per_input=artefact.seconds_per_input,
        )
        for n in levels(method, where, workshop.study, workshop.data)
    ]


def _errors(workshop: Workshop, method: Method) -> list[tuple[tuple[str, str], float]]:
    """Return the bootstrap's standard errors on as many clean images as most methods see."""
    study = workshop.study
    log_probs = _log_probs(workshop, method, CLEAN)[: study.images.network_wide]
    labels = workshop.data.labels(len(log_probs))
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(labels), (study.resamples, len(labels)), generator=generator)
    scored = [metrics.summary(log_probs[rows], labels[rows], study.bins) for rows in draws]
    return [
        ((method.name, score), stdev(scores[score] for scores in scored)) for score in scored[0]
    ]


def _diagrams(
    workshops: list[Workshop], methods: Sequence[Method], found: Gathering
) -> dict[tuple[str, str], Diagram]:
    """Return diagrams of clean and blurred images, by method's name and shift."""
    study, diagrams = workshops[0].study, {}
    for method, where in product(methods, blurred_shifts(study)):
        parts = found.each(_log_probs, product(workshops, [method], [where]))
        if parts:
            labels = workshops[0].data.labels(len(parts[0]))
            diagrams[method.name, where] = diagram(parts, labels, study.bins)
    return diagrams


def blurred_shifts(study: Cifar10CStudy) -> list[str]:
    """Return clean images and those under Gaussian blur that the study sees, by severity."""
    severities = sorted({*study.blurred} & {*study.severities})
    return [CLEAN, *(shift(BLUR, severity) for severity in severities)]


def _agreement(workshop: Workshop, method: Method) -> Agreement:
    distances, same = [], []
    for where in workshop.study.shifts:
        steps, fast = (
            _log_probs(workshop, replace(method, solver=solver), where).exp()
            for solver in (method.solver, LINEARISED)
        )
        both = min(len(steps), len(fast))
        distances.append((steps[:both] - fast[:both]).abs().sum(1) / 2)
        same.append((steps[:both].argmax(1) == fast[:both].argmax(1)).double())
    ready, all_distances = chosen(method, workshop), torch.cat(distances)
    scores = all_distances.mean().item(), torch.cat(same).mean().item()
    return Agreement(ready, len(all_distances), *scores)


def _unsolved(
    workshops: list[Workshop], methods: Sequence[Method], found: Gathering
) -> Iterator[Unsolved]:
    """Count the predictions without a solution, for methods that have some."""
    for method in (method for method in methods if method.solver):
        shifts = workshops[0].study.shifts
        flags = found.each(_flags, product(workshops, [method], shifts))
        if flags and (every := torch.cat(flags)).any():
            yield Unsolved(method, int(every.sum()), len(every))


def _flags(workshop: Workshop, method: Method, where: str) -> Tensor:
    return predict_shift(chosen(method, workshop), where, workshop).load()[UNSOLVED]
