"""Is ACNML with the linearised network as good as with the network itself, over all layers?

`Acnml` predicts with the linearised network, which is solved exactly. It is compared with the
network itself at the displaced weights, also after ascent, and with the paper's five steps. One
rule sets α on upright images: the largest within a price over the network at the posterior's mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from scipy.stats import t as student

from acnml import Acnml, Bma, Classifier, Gradient, Linearised, Map, fit_laplace, metrics
from acnml.fit import fit_bayes_by_backprop
from acnml.posteriors import Posterior
from acnml.predictors import Predictor
from acnml.solve import Solver
from studies.data import Labelled, shuffled, split
from studies.data.digits import CLASSES, load_mnist, rotate
from studies.engine.report import Section, ShortReport
from studies.engine.tables import Table, mean, mean_std, select
from studies.if_comp import largest
from studies.models.mlp import mlp
from studies.store import Content, Stage, Store
from studies.training import Averaging, Nobody, Processes, Task, train

POSTERIORS = BBP, SWAG, KFAC = "Bayes by Backprop", "SWAG-D", "KFAC"
PLAIN, TEMPERATURE, BMA = "network", "temperature", "BMA, 30 samples"
LINEARISED = "linearised network"
RIVALS: Mapping[str, Solver] = {
    "true network": Linearised("network"),
    "true network, ten ascent steps": Linearised("network", polish=10),
    "paper's five steps": Gradient(5, 0.5),
}
SOLVERS: Mapping[str, Solver] = {LINEARISED: Linearised(), **RIVALS}
METHODS = (PLAIN, TEMPERATURE, BMA, *SOLVERS)
SCORES = ("ece", "nll", "brier")

BATCH, EXACT = 100, 0.01  # images in a training step, and of the logarithm of α
RATE, DECAY = 0.05, 5e-4  # of SGD
FASTER = 0.01  # than the means, the log-variances of Bayes by Backprop

READING = (
    "Means over seeds; rotated means all angles but 0. In brackets is the difference to the "
    "linearised network with its 95 % interval over seeds and angles: above 0, the linearised "
    "network is better. Knobs in metrics.csv are α, a temperature less 1, and a scale of Σ for BMA."
)


@final
@dataclass(frozen=True)
class LinearisedStudy:
    """The settings.

    Args:
        hidden: units of the network.
        train: images.
        validation: upright images for choosing α.
        test: images at every angle.
        angles: in degrees; 0 is needed.
        epochs: of training; SWAG-D collects the weights of the last third.
        price: in nats, over the network.
        seeds: of splits and training.
    """

    hidden: tuple[int, ...] = (256, 256)
    train: int = 10_000
    validation: int = 300
    test: int = 300
    angles: tuple[int, ...] = (0, 45, 90, 135, 180)
    epochs: int = 20
    price: float = 0.01
    seeds: tuple[int, ...] = (0, 1)


PRESETS: Mapping[str, LinearisedStudy] = {
    "quick": LinearisedStudy(train=2000, validation=200, test=100, epochs=9, seeds=(0,)),
    "full": LinearisedStudy(),
}


class Scored(NamedTuple):
    """A method at one angle."""

    posterior: str
    seed: int
    method: str
    knob: float
    angle: int
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


def fitted(
    name: str, study: LinearisedStudy, data: Labelled, seed: int
) -> tuple[Classifier, Posterior]:
    """Train a network; return it at the mean of a posterior, and the posterior."""
    torch.manual_seed(seed)
    network = mlp(CLASSES, study.hidden, data.inputs[0].numel())
    batches = list(zip(data.inputs.split(BATCH), data.labels.split(BATCH), strict=True))
    if name == BBP:
        found = fit_bayes_by_backprop(
            network, batches, epochs=study.epochs, variance_learning_rate=FASTER, seed=seed
        )
        return Classifier(network).at(found.mean), found
    start = 2 * study.epochs // 3
    schedule = Averaging(study.epochs, start, RATE, RATE, weight_decay=DECAY, batch_size=BATCH)
    trained = train(Task(network, data, lambda x, _: x), schedule, seed, Processes(), Nobody())
    assert trained is not None  # this process leads
    classifier = Classifier(network).at(trained.average)
    if name == SWAG:
        return classifier, trained.collected.diagonal()
    prior = DECAY * len(data.labels)
    return classifier, fit_laplace(classifier, batches, prior_precision=prior, progress=False)


def predictor(method: str, classifier: Classifier, posterior: Posterior, knob: float) -> Predictor:
    """Return a method with its knob: α, or for the network what is added to its temperature."""
    if method in (PLAIN, TEMPERATURE):
        return Map(classifier.tempered(1 + knob))
    if method == BMA:
        return Bma(classifier, posterior.scaled(knob))
    return Acnml(classifier, posterior, SOLVERS[method], alpha=knob, on_unsolved="ignore")


def measured(name: str, study: LinearisedStudy, seed: int, _: object) -> Content:
    """Train, choose all knobs on upright images, and evaluate at every angle."""
    known = load_mnist("train").first(study.train + study.validation)
    data, held_out = split(known, (study.train, study.validation), seed)
    pair = fitted(name, study, data, seed)
    limit = metrics.nll(Map(pair[0])(held_out.inputs), held_out.labels) + study.price
    whole = load_mnist("test")
    images, labels = whole.take(shuffled(len(whole.labels), seed)[: study.test])
    rows = []
    for method in METHODS:
        family = partial(predictor, method, *pair)
        knob = 0.0 if method == PLAIN else largest(family, held_out, limit, EXACT)
        for angle in study.angles:
            scores = metrics.summary(family(knob)(rotate(images, angle)), labels)
            rows.append(Scored(name, seed, method, knob, angle, len(labels), **scores)._asdict())
    return Content({}, {"rows": rows})


def run(study: LinearisedStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    sizes = (study.hidden, study.train, study.validation, study.test, study.epochs)
    rows: list[Scored] = []
    for seed in study.seeds:
        for name in POSTERIORS:
            stage = Stage(f"measure {name}", (*sizes, study.angles, study.price), seed)
            made = store.make(stage, partial(measured, name, study, seed))
            rows += [Scored(**row) for row in made.facts["rows"]]
    sections = [Section("Rotated MNIST", [READING], [], [table(rows, p) for p in POSTERIORS])]
    numbers = {"metrics.csv": (Scored._fields, rows)}
    title = "The linearised network"
    return ShortReport(title, verdict(rows), sections, command, numbers).write(out)


def gap(rows: Sequence[Scored], posterior: str, method: str, score: str) -> tuple[float, float]:
    """Return how much higher the linearised network's score is: mean and half a 95 % interval."""
    rotated = [row for row in select(rows, posterior=posterior) if row.angle]
    pairs = zip(select(rotated, method=LINEARISED), select(rotated, method=method), strict=True)
    apart = [getattr(ours, score) - getattr(its, score) for ours, its in pairs]
    middle, std = mean_std(apart)
    if len(apart) == 1:
        return middle, math.inf
    return middle, float(student.ppf(0.975, len(apart) - 1)) * std / math.sqrt(len(apart))


def table(rows: Sequence[Scored], posterior: str) -> Table:
    """Return the scores of every method, and how it compares with the linearised network."""
    lines = []
    for method in METHODS:
        own = select(rows, posterior=posterior, method=method)
        rotated = [row for row in own if row.angle]
        cells = [f"{mean(select(own, angle=0), score):.3f}" for score in SCORES]
        for score in SCORES:
            middle, half = gap(rows, posterior, method, score)
            apart = "" if method == LINEARISED else f" ({-middle:+.4f} ± {half:.4f})"
            cells.append(f"{mean(rotated, score):.3f}{apart}")
        lines.append([method, *cells])
    head = (f"{score}, {where}" for where in ("upright", "rotated") for score in SCORES)
    return Table(f"{posterior}.", ("method", *head), lines)


def verdict(rows: Sequence[Scored]) -> str:
    """Say in how many comparisons the linearised network is worse beyond the interval."""
    every = [gap(rows, name, r, score) for score in SCORES for name in POSTERIORS for r in RIVALS]
    worse, better = sum(m > half for m, half in every), sum(m < -half for m, half in every)
    cases = len(every) // len(SCORES)
    most = [max(m for m, _ in every[i : i + cases]) for i in range(0, len(every), cases)]
    return (
        f"{len(every)} comparisons on rotated images at equal price: the linearised network is "
        f"worse beyond the 95 % interval in {worse} and better in {better}. At most it is higher "
        f"by {most[0]:.4f} in ECE, {most[1]:.4f} in NLL and {most[2]:.4f} in Brier."
    )
