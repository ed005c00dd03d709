"""What the study has found so far, as plain numbers, read from saved predictions alone.

Some methods see fewer images than others, always the first of one order. Calibration errors are
comparable for the same images only, so the others are scored on these as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml import metrics
from studies.rotated_mnist.detection import Detection, by_brightness, detections
from studies.rotated_mnist.frontier import SweepPoint, chosen, sweep_point
from studies.rotated_mnist.methods import (
    ACNML_BBP,
    ACNML_KFAC,
    ACNML_SWAG,
    BMA_KFAC,
    CHEAP,
    CONVERGED,
    LINEARISED,
    METHODS,
    PAPER,
    SWEPT,
    Method,
    images_of,
)
from studies.rotated_mnist.naive import Comparison, compare, compared_shifts
from studies.rotated_mnist.predict import predict_shift, shifts_of
from studies.rotated_mnist.shifts import StudyData
from studies.rotated_mnist.study import LETTERS, RANDOM, RotatedMnist
from studies.rotated_mnist.workshop import Workshop
from studies.study.artefacts import Artefacts, Gathering
from studies.study.knobs import sweep_values
from studies.study.saved import log_probs_of
from studies.study.scores import Diagram, Row, diagram

STUDY = "rotated-mnist"


class Agreement(NamedTuple):
    """How far a solver's probabilities are from the converged ones, on average over all shifts."""

    method: Method
    total_variation: float
    residual: float  # of the converged solution, its median


@final
@dataclass(frozen=True, eq=False)
class Results:
    """All that tables, figures and the report are made of."""

    study: RotatedMnist
    data: StudyData
    rows: tuple[Row[Method], ...]
    diagrams: dict[tuple[str, str], Diagram]  # by method's name and shift
    detections: tuple[Detection, ...]
    agreements: tuple[Agreement, ...]
    sweep: tuple[SweepPoint, ...]
    comparisons: tuple[Comparison, ...]
    epoch_seconds: float | None  # of training the plain network
    missing: tuple[str, ...]  # what is not finished

    def values(self, method: Method, score: str, shift: str, n: int | None = None) -> list[float]:
        """Return a score on the first n images of a shift, all by default, for every seed."""
        wanted = method.name, shift, n or self.images([method])
        rows = (r for r in self.rows if (r.method.name, r.shift, r.n) == wanted)
        return [float(getattr(row, score)) for row in rows]

    def images(self, methods: Sequence[Method]) -> int:
        """Return how many images of every shift all these methods see."""
        return self.data.count(min(images_of(method, self.study) for method in methods))

    def fastest(self, method: Method) -> float | None:
        """Return the seconds that an image takes, of all seeds and shifts when it was fastest.

        A run takes hours, and whatever else the machine has to do in them makes a method slower.
        """
        times = [r.seconds_per_input for r in self.rows if r.method.name == method.name]
        return min(times, default=None)


def collect(study: RotatedMnist, data: StudyData, artefacts: Artefacts) -> Results:
    """Gather what is finished, and note what is not."""
    workshops = [Workshop(study, data, artefacts, seed) for seed in study.seeds]
    first, found = workshops[0], Gathering()
    sweep = (
        (family, value) for family in SWEPT for value in sweep_values(family.knob, study.frontier)
    )
    return Results(
        study,
        data,
        rows=tuple(chain(*found.each(_rows, product(workshops, METHODS, study.shifts)))),
        diagrams=_diagrams(workshops, found),
        detections=(*_brightness(first), *chain(*found.each(_detect, product(workshops, CHEAP)))),
        agreements=found.each(_agreement, product([first], _solved())),
        sweep=found.each(sweep_point, ((*point, first) for point in sweep)),
        comparisons=found.each(compare, product([first], compared_shifts(study))),
        epoch_seconds=next(iter(found.each(_seconds_per_epoch, [(first,)])), None),
        missing=tuple(found.missing),
    )


def _rows(workshop: Workshop, method: Method, shift: str) -> list[Row[Method]]:
    """Score a method on all its images, and on as many as the methods beside it see."""
    ready, study = chosen(method, workshop), workshop.study
    artefact = predict_shift(ready, shift, workshop)
    log_probs, labels = log_probs_of(artefact.load()), workshop.data.test.labels
    beside = workshop.data.count(images_of(BMA_KFAC, study))
    return [
        Row(
            ready,
            workshop.seed,
            shift,
            n,
            **metrics.summary(log_probs[:n], labels[:n], study.bins),
            seconds_per_input=artefact.seconds_per_input,
        )
        for n in sorted({len(log_probs), min(beside, len(log_probs))}, reverse=True)
    ]


def _diagrams(workshops: list[Workshop], found: Gathering) -> dict[tuple[str, str], Diagram]:
    """Return the diagrams of upright and of randomly turned images, by method's name and shift."""
    diagrams = {}
    for method, shift in product(METHODS, ("0°", RANDOM)):
        parts = found.each(_log_probs, product(workshops, [method], [shift]))
        if parts:
            labels = workshops[0].data.test.labels[: len(parts[0])]
            diagrams[method.name, shift] = diagram(parts, labels, workshops[0].study.bins)
    return diagrams


def _log_probs(workshop: Workshop, method: Method, shift: str) -> Tensor:
    return log_probs_of(predict_shift(chosen(method, workshop), shift, workshop).load())


def _detect(workshop: Workshop, method: Method) -> list[Detection]:
    if LETTERS not in shifts_of(workshop):
        return []
    ready = chosen(method, workshop)
    inside, outside = (predict_shift(ready, s, workshop).load() for s in ("0°", LETTERS))
    return detections(ready, workshop.seed, inside, outside)


def _brightness(workshop: Workshop) -> list[Detection]:
    if LETTERS not in shifts_of(workshop):
        return []
    count = workshop.data.count(workshop.study.images.cheap)
    inside, outside = (workshop.data.shifted(s, count).images for s in ("0°", LETTERS))
    return [by_brightness(workshop.seed, inside, outside)]


def _solved() -> list[Method]:
    methods = (ACNML_BBP, ACNML_KFAC, ACNML_SWAG)
    return [replace(method, solver=solver) for method in methods for solver in (LINEARISED, PAPER)]


def _agreement(workshop: Workshop, method: Method) -> Agreement:
    ready, distances, residuals = chosen(method, workshop), [], []
    for shift in workshop.study.shifts:
        exact = predict_shift(replace(ready, solver=CONVERGED), shift, workshop).load()
        probs = log_probs_of(predict_shift(ready, shift, workshop).load()).exp()
        expected = log_probs_of(exact).exp()
        both = min(len(probs), len(expected))
        distances.append((probs[:both] - expected[:both]).abs().sum(1) / 2)
        residuals.append(exact["residual"].flatten())
    means = torch.cat(distances).mean().item(), torch.cat(residuals).median().item()
    return Agreement(ready, *means)


def _seconds_per_epoch(workshop: Workshop) -> float:
    network = workshop.network()
    return network.seconds / int(network.facts["epochs"])
