"""Is ACNML with the linearised network as good as with the network itself, over all layers?

`Acnml` predicts with the linearised network, which is solved exactly. It is compared with the
network itself at the displaced weights, also after ascent, and with the paper's five steps. One
rule sets α on images without shift: the largest within a price over the network at the posterior's
mean. Small networks for rotated MNIST are trained here; the ResNet-20 for CIFAR-10-C is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import torch
from scipy.stats import t as student
from torch import Tensor

from acnml import Acnml, Bma, Classifier, Gradient, Linearised, Map, fit_laplace, metrics
from acnml.fit import KroneckerCurvature, fit_bayes_by_backprop, fit_curvature
from acnml.posteriors import Posterior
from acnml.predictors import Predictor
from acnml.solve import Solver, UnsolvedError
from studies.cifar10_c.recipes import RECIPES
from studies.corruptions import CORRUPTIONS
from studies.data import Labelled, cifar10, shuffled, split
from studies.data.digits import CLASSES, load_mnist, rotate
from studies.engine.grounds import rescaled
from studies.engine.report import Section, ShortReport
from studies.engine.tables import Table, mean, mean_std, select
from studies.if_comp import largest
from studies.models.mlp import mlp
from studies.models.weights import Weights
from studies.search import near
from studies.store import Content, Stage, Store
from studies.training import Averaging, Nobody, Processes, Task, train

POSTERIORS = BBP, SWAG, KFAC = "Bayes by Backprop", "SWAG-D", "KFAC"
PLAIN, TEMPERATURE, BMA = "network", "temperature", "BMA, 30 samples"
LINEARISED = "linearised network"
TRUE, ASCENT, STEPS = "true network", "true network, ten ascent steps", "paper's five steps"
RIVALS: Mapping[str, Solver] = {
    TRUE: Linearised("network"),
    ASCENT: Linearised("network", polish=10),
    STEPS: Gradient(5, 0.5),
}
SOLVERS: Mapping[str, Solver] = {LINEARISED: Linearised(), **RIVALS}
METHODS = (PLAIN, TEMPERATURE, BMA, *SOLVERS)
SCORES = ("ece", "nll", "brier")

BATCH, EXACT = 100, 0.01  # images in a training step, and of the logarithm of α
UNSHIFTED = "0", "clean"
RENEWED = 500  # training images for the batch norm of a sample
RATE, DECAY = 0.05, 5e-4  # of SGD
FASTER = 0.01  # than the means, the log-variances of Bayes by Backprop

READING = (
    "Means over seeds and shifts. In brackets is the difference to the linearised network with its "
    "95 % interval over seeds and shifts: above 0, the linearised network is better. Knobs in "
    "metrics.csv are α, a temperature less 1, and a scale of Σ for BMA."
)


class Prepared(NamedTuple):
    """A network at the mean of a posterior, with the images that it is tested on."""

    classifier: Classifier
    posterior: Posterior
    held_out: Labelled
    shifts: Mapping[str, Labelled]  # the first is none
    train: Tensor | None = None  # for the batch norm of samples, where the network has it


@final
@dataclass(frozen=True)
class LinearisedStudy:
    """The settings for rotated MNIST.

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

    title = "Rotated MNIST"
    posteriors, methods = POSTERIORS, METHODS

    def images(self, method: str) -> int:
        """How many images of every shift a method sees."""
        del method
        return self.test

    def prepared(self, posterior: str, seed: int, _: Store) -> Prepared:
        """Train a network with its posterior."""
        known = load_mnist("train").first(self.train + self.validation)
        data, held_out = split(known, (self.train, self.validation), seed)
        whole = load_mnist("test")
        images, labels = whole.take(shuffled(len(whole.labels), seed)[: self.test])
        shifts = {f"{angle}": Labelled(rotate(images, angle), labels) for angle in self.angles}
        return Prepared(*fitted(posterior, self, data, seed), held_out, shifts)


@final
@dataclass(frozen=True)
class ResNetStudy:
    """The settings for CIFAR-10-C and a given ResNet-20.

    Args:
        train: images that the curvature is measured on; it is scaled to all training images.
        validation: clean test images for choosing α.
        test: other test images, under every corruption.
        few: of these for the network after ascent, which takes seconds for an image and has the α
            of the network without it; 0 leaves it out.
        corruptions: their names.
        severity: of all corruptions.
        price: in nats, over the network.
        seeds: of splits.
    """

    train: int = 2000
    validation: int = 200
    test: int = 200
    few: int = 0
    corruptions: tuple[str, ...] = (
        *("gaussian_noise", "defocus_blur", "fog"),
        *("contrast", "pixelate", "jpeg_compression"),
    )
    severity: int = 5
    price: float = 0.01
    seeds: tuple[int, ...] = (0,)

    title = "CIFAR-10-C"
    posteriors = (KFAC,)

    @property
    def methods(self) -> tuple[str, ...]:
        """All but the paper's steps, which take even longer than the ascent."""
        return tuple(m for m in METHODS if m != STEPS and (self.few or m != ASCENT))

    def images(self, method: str) -> int:
        """How many images of every shift a method sees."""
        return self.few if method == ASCENT else self.test

    def prepared(self, _: str, seed: int, store: Store) -> Prepared:
        """Fit the posterior, and make the corrupted images."""
        weights, whole, test = Weights.given("resnet20"), *map(cifar10.load, ("train", "test"))
        classifier = Classifier(weights.build())
        train = weights.prepare(whole.inputs[shuffled(len(whole.labels), seed)[: self.train]])
        decay = RECIPES["resnet20"].training.weight_decay

        def fit(_: object) -> Content:
            found = fit_curvature(classifier, list(train.split(BATCH)), progress=False)
            assert isinstance(found, KroneckerCurvature)
            found = rescaled(found, len(whole.labels) / self.train)
            return Content.of_saved(found.posterior(decay * len(whole.labels)))

        posterior = store.make(
            Stage("fit KFAC", (self.train, weights.checksum), seed), fit
        ).load_saved()
        order = shuffled(len(test.labels), seed)
        rows = order[self.validation :][: self.test]
        clean = test.inputs[rows].movedim(1, -1).contiguous().numpy()

        def images(pixels: Tensor) -> Labelled:
            return Labelled(weights.prepare(pixels.movedim(-1, 1)), test.labels[rows])

        shifts = {"clean": images(torch.from_numpy(clean))}
        for name in self.corruptions:
            corrupted = CORRUPTIONS[name](clean, self.severity, rows.tolist())
            shifts[f"{name} {self.severity}"] = images(torch.from_numpy(corrupted))
        known = test.take(order[: self.validation])
        held_out = Labelled(weights.prepare(known.inputs), known.labels)
        return Prepared(classifier, posterior, held_out, shifts, train[:RENEWED])


Study: TypeAlias = LinearisedStudy | ResNetStudy
PRESETS: Mapping[str, Study] = {
    "quick": LinearisedStudy(train=2000, validation=200, test=100, epochs=9, seeds=(0,)),
    "full": LinearisedStudy(),
    "resnet20": ResNetStudy(),
}


class Scored(NamedTuple):
    """A method under one shift."""

    posterior: str
    seed: int
    method: str
    knob: float
    shift: str
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


def predictor(
    method: str,
    classifier: Classifier,
    posterior: Posterior,
    knob: float,
    train: Tensor | None = None,
) -> Predictor:
    """Return a method with its knob: α, or for the network what is added to its temperature.

    With training inputs, every sample of BMA gets batch-norm statistics of its own.
    """
    if method in (PLAIN, TEMPERATURE):
        return Map(classifier.tempered(1 + knob))
    if method == BMA:
        average = Bma(classifier, posterior.scaled(knob))
        return average if train is None else average.refreshed([train], progress=False)
    return Acnml(classifier, posterior, SOLVERS[method], alpha=knob, on_unsolved="ignore")


def chosen(method: str, own: Prepared, price: float, known: Mapping[str, float]) -> float:
    """Return the knob of a method at a price; `known` are those of the methods before."""
    held_out, family = own.held_out, partial(_family, method, own)
    limit = metrics.nll(Map(own.classifier)(held_out.inputs), held_out.labels) + price
    if method == PLAIN:
        return 0.0
    if method == TEMPERATURE:
        return largest(family, held_out, limit, EXACT)
    if method == LINEARISED:  # one Jacobian for all α
        linearised = Acnml(own.classifier, own.posterior, SOLVERS[method])
        problem = linearised.problem(held_out.inputs)

    @cache
    def nll(knob: float) -> float:
        try:
            if method == LINEARISED:
                log_probs = linearised.solve_problem(problem.scaled(knob)).log_probs
            else:
                log_probs = family(knob)(held_out.inputs)
        except UnsolvedError:  # the paper's steps can diverge
            return math.inf
        return metrics.nll(log_probs, held_out.labels)

    return near(nll, limit, known.get(LINEARISED, 0.1), EXACT)


def _family(method: str, own: Prepared, knob: float) -> Predictor:
    return predictor(method, own.classifier, own.posterior, knob, own.train)


def measured(
    study: Study, own: Callable[[], Prepared], method: str, known: Mapping[str, float], _: object
) -> Content:
    """Choose the knob of a method without shift, and predict under every shift."""
    it = own()
    is_slow = study.images(method) < study.test
    knob = known[TRUE] if is_slow else chosen(method, it, study.price, known)
    made, found = _family(method, it, knob), {}
    for shift, (images, _labels) in it.shifts.items():
        found[shift] = torch.cat([made(x) for x in images[: study.images(method)].split(BATCH)])
    return Content(found, {"knob": knob})


def collected(study: Study, store: Store) -> list[Scored]:
    """Do everything that is missing; score every method on all images that it has seen.

    Where some methods have seen fewer images, the others are scored on those as well.
    """
    rows: list[Scored] = []
    sizes = sorted({study.images(method) for method in study.methods}, reverse=True)
    for seed in study.seeds:
        for posterior in study.posteriors:
            own, knobs = cache(partial(study.prepared, posterior, seed, store)), dict[str, float]()
            labels = next(iter(own().shifts.values())).labels
            for method in (LINEARISED, *(m for m in study.methods if m != LINEARISED)):
                stage = Stage(f"{posterior} {method}", _decides(study), seed)
                made = store.make(stage, partial(measured, study, own, method, dict(knobs)))
                knobs[method] = made.facts["knob"]
                for shift, log_probs in made.load().items():
                    for n in (n for n in sizes if n <= len(log_probs)):
                        found = metrics.summary(log_probs[:n], labels[:n])
                        four = found["accuracy"], found["nll"], found["brier"], found["ece"]
                        one = posterior, seed, method, knobs[method], shift, n
                        rows.append(Scored(*one, *four))
    return sorted(
        rows, key=lambda r: (r.seed, POSTERIORS.index(r.posterior), METHODS.index(r.method))
    )


def _decides(study: Study) -> dict[str, Any]:
    """Return the settings, except the seeds, of which every stage has its own."""
    return {name: value for name, value in vars(study).items() if name != "seeds"}


def run(study: Study, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    rows = collected(study, store)
    sizes = dict.fromkeys(row.n for row in sorted(rows, key=lambda row: -row.n))
    parts = {n: [row for row in rows if row.n == n] for n in sizes}
    tables = [table(own, p, n) for n, own in parts.items() for p in study.posteriors]
    sections = [Section(study.title, [READING], [], tables)]
    numbers = {"metrics.csv": (Scored._fields, rows)}
    finding = " ".join(f"{n} images: {verdict(own)}" for n, own in parts.items())
    return ShortReport("The linearised network", finding, sections, command, numbers).write(out)


def shifted(rows: Iterable[Scored]) -> list[Scored]:
    """Return the rows with shift."""
    return [row for row in rows if row.shift not in UNSHIFTED]


def gap(rows: Sequence[Scored], posterior: str, method: str, score: str) -> tuple[float, float]:
    """Return how much higher the linearised network's score is: mean and half a 95 % interval."""
    own = shifted(select(rows, posterior=posterior))
    pairs = zip(select(own, method=LINEARISED), select(own, method=method), strict=True)
    apart = [getattr(ours, score) - getattr(its, score) for ours, its in pairs]
    middle, std = mean_std(apart)
    if len(apart) == 1:
        return middle, math.inf
    return middle, float(student.ppf(0.975, len(apart) - 1)) * std / math.sqrt(len(apart))


def table(rows: Sequence[Scored], posterior: str, images: int) -> Table:
    """Return the scores of every method, and how it compares with the linearised network."""
    lines = []
    for method in methods_of(rows):
        every = select(rows, posterior=posterior, method=method)
        own, clean = shifted(every), [row for row in every if row.shift in UNSHIFTED]
        cells = [f"{mean(clean, score):.3f}" for score in SCORES]
        for score in SCORES:
            middle, half = gap(rows, posterior, method, score)
            apart = "" if method == LINEARISED else f" ({-middle:+.4f} ± {half:.4f})"
            cells.append(f"{mean(own, score):.3f}{apart}")
        lines.append([method, *cells])
    head = (f"{score}, {where}" for where in ("no shift", "shift") for score in SCORES)
    return Table(f"{posterior}, {images} images.", ("method", *head), lines)


def methods_of(rows: Iterable[Scored]) -> list[str]:
    """Return the methods that have rows, in their order."""
    found = {row.method for row in rows}
    return [method for method in METHODS if method in found]


def verdict(rows: Sequence[Scored]) -> str:
    """Say in how many comparisons the linearised network is worse beyond the interval."""
    names, rivals = {row.posterior for row in rows}, [r for r in methods_of(rows) if r in RIVALS]
    every = [gap(rows, name, r, score) for score in SCORES for name in names for r in rivals]
    worse, better = sum(m > half for m, half in every), sum(m < -half for m, half in every)
    cases = len(every) // len(SCORES)
    most = [max(m for m, _ in every[i : i + cases]) for i in range(0, len(every), cases)]
    return (
        f"{len(every)} comparisons on shifted images at equal price: the linearised network is "
        f"worse beyond the 95 % interval in {worse} and better in {better}. At most it is higher "
        f"by {most[0]:.4f} in ECE, {most[1]:.4f} in NLL and {most[2]:.4f} in Brier."
    )
