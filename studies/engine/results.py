"""What a study has found so far, as plain numbers, read from saved predictions alone.

Scores are taken on several numbers of inputs, always the first of one order: calibration errors are
comparable only for the same inputs, and some methods see fewer than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from statistics import fmean, stdev
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from acnml import metrics
from studies.engine.choose import (
    Chosen,
    SweepPoint,
    chosen,
    explained,
    sweep_point,
)
from studies.engine.method import Method, cautious_first
from studies.engine.predict import predict_shift
from studies.engine.predictors import RESIDUAL, UNSOLVED, log_probs_of
from studies.engine.study import Study, StudyData, bins_for
from studies.engine.workshop import Artefacts, Gathering, Workshop

ENOUGH = 5  # times the study's bins: inputs from which tables show a method's calibration error
SCORES = ("accuracy", "nll", "brier", "ece")
NO_NETWORK = Method("no network", "inputs")
REGRET, CONFIDENCE, ENTROPY, ENERGY = "regret", "max-probability", "entropy", "energy"


class Row(NamedTuple):
    """The scores of one method on the first n inputs of one shift, for one seed."""

    method: Method
    seed: int
    shift: str
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


class Timing(NamedTuple):
    """How long one prediction took, on average over the inputs of a shift."""

    method: Method
    seed: int
    shift: str
    seconds_per_input: float


class Diagram(NamedTuple):
    """Points of a reliability diagram, over all seeds."""

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]


class Detected(NamedTuple):
    """How well one score of one method detects out-of-distribution inputs, for one seed."""

    method: Method
    seed: int
    score: str
    auroc: float
    fpr95: float


class Agreement(NamedTuple):
    """How close the predictions of a method are to those of another, over all shifts."""

    method: Method
    reference: Method
    inputs: int
    total_variation: float  # mean
    same: float  # share of inputs with the same predicted class
    residual: float | None  # median of the reference's residuals, where they are saved


class Unsolved(NamedTuple):
    """How many predictions of a method have no solution, over all shifts and seeds."""

    method: Method
    inputs: int
    of: int


@final
@dataclass(frozen=True, eq=False)
class Results:
    """Everything that tables, figures and the report are made of."""

    study: Study
    data: StudyData
    rows: tuple[Row, ...]
    timings: tuple[Timing, ...]
    errors: Mapping[tuple[str, str], float]  # bootstrap by method's name and score, no shift
    diagrams: Mapping[tuple[str, str], Diagram]  # by method's name and shift
    detections: tuple[Detected, ...]
    agreements: tuple[Agreement, ...]
    sweep: tuple[SweepPoint, ...]
    chosen: tuple[Chosen, ...]  # knobs of the first seed
    unsolved: tuple[Unsolved, ...]  # methods with at least one
    extras: Mapping[str, Any]  # by name, where they are finished
    seconds_per_epoch: float | None  # of training the plain network
    missing: tuple[str, ...]  # what is not finished

    @cached_property
    def _places(self) -> dict[tuple[str, str, int], list[Row]]:
        """The rows of all seeds, by method's name, shift and number of inputs."""
        places: dict[tuple[str, str, int], list[Row]] = {}
        for row in self.rows:
            places.setdefault((row.method.name, row.shift, row.n), []).append(row)
        return places

    def inputs(self, methods: Iterable[Method], shift: str | None = None) -> int:
        """Return how many inputs all these methods see, at one shift or at every one."""
        counts = (
            self.study.share(method, each).inputs
            for method in methods
            for each in (self.study.seen_by(method) if shift is None else (shift,))
        )
        return self.data.count(min(counts))

    def values(self, method: Method, score: str, shift: str, n: int | None = None) -> list[float]:
        """Return a score on the first n inputs of a shift, by default all, for every seed.

        Empty while a seed is missing: means over different seeds do not compare.
        """
        rows = self._places.get((method.name, shift, n or self.inputs([method], shift)), [])
        whole = len(rows) == len(self.study.seeds)
        return [float(getattr(row, score)) for row in rows] if whole else []

    def each(self, method: Method, score: str, shifts: Sequence[str], n: int) -> list[float]:
        """Return a score at every one of some shifts, the mean over seeds; empty if one misses."""
        found = [self.values(method, score, shift, n) for shift in shifts]
        return [fmean(values) for values in found] if found and all(found) else []

    def mean(self, method: Method, score: str, shifts: Sequence[str], n: int) -> float | None:
        """Return the mean of a score over shifts and seeds, None if some are missing."""
        found = self.each(method, score, shifts, n)
        return fmean(found) if found else None

    def seconds(self, method: Method) -> float | None:
        """Return the seconds of a prediction: the fastest of all seeds and shifts.

        A run takes hours, and whatever else the machine does in them makes a method slower.
        """
        times = [t.seconds_per_input for t in self.timings if t.method.name == method.name]
        return min(times, default=None)

    def path(self, family: Method) -> list[SweepPoint]:
        """Return the sweep of a family, the most cautious value first."""
        return [point for point in self.sweep if point.family == family.family]


def collect(study: Study, data: StudyData, artefacts: Artefacts) -> Results:
    """Gather what is finished, and note what is not."""
    workshops = [Workshop(study, data, artefacts, seed) for seed in study.seeds]
    first, found = workshops[0], Gathering()
    seen = [(m, shift) for m in study.methods for shift in study.seen_by(m)]
    scored = found.each(_scored, ((workshop, *each) for workshop in workshops for each in seen))
    swept = () if study.frontier is None else study.frontier.families
    sweep = ((f, value) for f in swept for value in cautious_first(f.knob, study.grids))
    bootstrapped = study.methods if study.resamples else ()
    return Results(
        study,
        data,
        rows=tuple(chain(*(rows for rows, _ in scored))),
        timings=tuple(timing for _, timing in scored),
        errors=dict(chain(*found.each(_errors, product([first], bootstrapped)))),
        diagrams=_diagrams(workshops, found),
        detections=(*_baselines(first), *chain(*found.each(_detect, _detections(workshops)))),
        agreements=found.each(_agreement, ((first, *pair) for pair in study.agreements)),
        sweep=found.each(sweep_point, ((*point, first) for point in sweep)),
        chosen=found.each(explained, ((m, first) for m in study.methods if m.value is None)),
        unsolved=tuple(_unsolved(workshops, found)),
        extras=dict(found.each(_extra, ((first, name) for name in study.extras))),
        seconds_per_epoch=next(iter(found.each(_seconds_per_epoch, [(first,)])), None),
        missing=tuple(found.missing),
    )


def _log_probs(workshop: Workshop, method: Method, shift: str) -> Tensor:
    return log_probs_of(predict_shift(chosen(method, workshop), shift, workshop).load())


def _scored(workshop: Workshop, method: Method, shift: str) -> tuple[list[Row], Timing]:
    """Score a method on all its inputs of a shift, and on as many as other methods see."""
    ready, study, data = chosen(method, workshop), workshop.study, workshop.data
    predictions = predict_shift(ready, shift, workshop)
    log_probs = log_probs_of(predictions.load())
    own = len(log_probs)
    levels = sorted({own, *(data.count(n) for n in study.levels if n < own)}, reverse=True)
    rows = [
        Row(
            ready,
            workshop.seed,
            shift,
            n,
            **metrics.summary(log_probs[:n], data.labels(n), bins_for(n, study.bins)),
        )
        for n in levels
    ]
    return rows, Timing(ready, workshop.seed, shift, predictions.seconds_per_input)


def _errors(workshop: Workshop, method: Method) -> list[tuple[tuple[str, str], float]]:
    """Return the bootstrap's standard errors on as many unshifted inputs as most methods see."""
    study = workshop.study
    log_probs = _log_probs(workshop, method, study.base)[: max(study.levels, default=None)]
    labels = workshop.data.labels(len(log_probs))
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(labels), (study.resamples, len(labels)), generator=generator)
    bins = bins_for(len(labels), study.bins)
    scored = [metrics.summary(log_probs[rows], labels[rows], bins) for rows in draws]
    return [
        ((method.name, score), stdev(scores[score] for scores in scored)) for score in scored[0]
    ]


def _diagrams(workshops: list[Workshop], found: Gathering) -> dict[tuple[str, str], Diagram]:
    """Return reliability diagrams over all seeds, by method's name and shift."""
    study, data, diagrams = workshops[0].study, workshops[0].data, {}
    for method, shift in product(study.methods, study.diagrams):
        if shift not in study.seen_by(method):
            continue
        parts = found.each(_log_probs, product(workshops, [method], [shift]))
        if parts:
            labels = data.labels(len(parts[0])).repeat(len(parts))
            points = metrics.reliability(torch.cat(list(parts)), labels, study.bins)
            diagrams[method.name, shift] = Diagram(
                tuple(points.confidence.tolist()), tuple(points.accuracy.tolist())
            )
    return diagrams


# Detection of out-of-distribution inputs --------------------------------------------------------


def _baselines(workshop: Workshop) -> list[Detected]:
    """Measure scores that need no network, on as many inputs as any method sees."""
    study, data = workshop.study, workshop.data
    if study.detection is None:
        return []
    count = data.count(max(study.share(m, study.base).inputs for m in study.detection.methods))
    shifts = study.base, study.detection.outside
    inside, outside = (data.load(shift, count).inputs for shift in shifts)
    return [
        detected(NO_NETWORK, workshop.seed, name, score(inside), score(outside))
        for name, score in study.detection.baselines.items()
    ]


def _detections(workshops: list[Workshop]) -> Iterable[tuple[Workshop, Method, str]]:
    detection = workshops[0].study.detection
    return () if detection is None else product(workshops, detection.methods, [detection.outside])


def _detect(workshop: Workshop, method: Method, outside: str) -> list[Detected]:
    """Measure every score that the saved predictions of a method have."""
    ready = chosen(method, workshop)
    known, unknown = (
        scores(predict_shift(ready, shift, workshop).load())
        for shift in (workshop.study.base, outside)
    )
    return [detected(ready, workshop.seed, name, known[name], unknown[name]) for name in known]


def detected(method: Method, seed: int, name: str, inside: Tensor, outside: Tensor) -> Detected:
    """Measure a score, which is to be higher for out-of-distribution inputs."""
    found = metrics.auroc(inside, outside), metrics.fpr95(inside, outside)
    return Detected(method, seed, name, *found)


def scores(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scores (N,) of saved predictions by name."""
    log_probs = log_probs_of(saved).double()
    found = {CONFIDENCE: -log_confidence(log_probs), ENTROPY: entropy(log_probs)}
    if "log_lik" in saved:
        found[REGRET] = torch.logsumexp(saved["log_lik"].double(), dim=-1)
    if "energy" in saved:
        found[ENERGY] = saved["energy"].double()
    return found


def log_confidence(log_probs: Tensor) -> Tensor:
    """Return max_y log p(y|x), a logarithm because probabilities near 1 would tie."""
    return log_probs.amax(dim=-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return -Σ_y p(y|x) log p(y|x)."""
    return torch.special.entr(log_probs.exp()).sum(dim=-1)


# Solvers and extras -----------------------------------------------------------------------------


def _agreement(workshop: Workshop, method: Method, reference: Method) -> Agreement:
    distances, same, residuals = [], [], []
    for shift in workshop.study.seen_by(method):
        ours = _log_probs(workshop, method, shift).exp()
        saved = predict_shift(chosen(reference, workshop), shift, workshop).load()
        theirs = log_probs_of(saved).exp()
        both = min(len(ours), len(theirs))
        distances.append((ours[:both] - theirs[:both]).abs().sum(1) / 2)
        same.append((ours[:both].argmax(1) == theirs[:both].argmax(1)).double())
        residuals += [saved[RESIDUAL].flatten()] if RESIDUAL in saved else []
    ready, every = chosen(method, workshop), torch.cat(distances)
    residual = torch.cat(residuals).median().item() if residuals else None
    means = every.mean().item(), torch.cat(same).mean().item()
    return Agreement(ready, reference, len(every), *means, residual)


def _unsolved(workshops: list[Workshop], found: Gathering) -> Iterator[Unsolved]:
    """Count the predictions without a solution, for methods that have some."""
    study = workshops[0].study
    for method in (method for method in study.methods if method.solver):
        flags = found.each(_flags, product(workshops, [method], study.seen_by(method)))
        if flags and (every := torch.cat(flags)).any():
            yield Unsolved(method, int(every.sum()), len(every))


def _flags(workshop: Workshop, method: Method, shift: str) -> Tensor:
    saved = predict_shift(chosen(method, workshop), shift, workshop).load()
    return saved.get(UNSOLVED, torch.zeros(0))  # ensembles save probabilities alone


def _extra(workshop: Workshop, name: str) -> tuple[str, Any]:
    return name, workshop.study.extras[name](workshop)


def _seconds_per_epoch(workshop: Workshop) -> float | None:
    study = workshop.study
    name = study.grounds[study.plain.posterior].network
    if study.networks[name].training is None:
        return None
    trained = workshop.trained(name)
    return trained.seconds / int(trained.facts["epochs"])
