"""The demo's study: `acnml.calibrate` and its rivals on rotated digits.

A few networks are trained, each from another seed and on another split of the data. For each of
them: train → calibrate → predict. The predictions are then measured together. The result,
`Findings`, is plain numbers; tables, figures and the report are made from it elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

import acnml
from acnml import metrics
from studies.data import Labelled, split
from studies.data.digits import SIZE, all_digits, rotate
from studies.demo.examples import Example, first_different
from studies.demo.training import Training, small_network, train
from studies.engine.results import Diagram
from studies.engine.tables import mean_std
from studies.search import Search
from studies.terminal import Progress, one_thread

PRICE = 0.01  # the default of `calibrate`, which names methods here as it does in its own table
METHODS = NETWORK, BEST, EQUAL, BMA, ACNML = (
    "network",
    "temperature",
    f"temperature, +{PRICE:g}",
    f"BMA, +{PRICE:g}",
    f"ACNML, +{PRICE:g}",
)
RIVALS = (EQUAL, BMA)  # what pays the same price as ACNML

# Of BMA's posterior: about 1 % of the curvature's mean eigenvalue, so that the data decide.
PRIOR_PRECISION = 0.005

# Shares of the progress bar; an angle is 1.
TRAINING_WORK, CALIBRATION_WORK = 6, 16

LogProbs: TypeAlias = Callable[[Tensor], Tensor]  # images -> (B, K)


@final
@dataclass(frozen=True)
class DemoStudy:
    """The settings of the study.

    Args:
        seed: of the first network: of its split, initial weights, batches and BMA's samples.
        networks: how many are trained, with the seeds that follow.
        hidden: units of a network.
        training: of a network.
        validation_images: upright images on which temperatures, scales and α are chosen.
        test_images: images that every method sees at every angle.
        angles: rotations in degrees, upright (0) first.
        shifted_from: the smallest angle that counts as shifted in tables and in the verdict.
        focus_angle: the rotation of the reliability diagrams.
        example_angles: the rotations of the examples.
        bins: bins of equal mass of ECE and reliability diagrams.
        samples: posterior samples of BMA.
    """

    seed: int = 0
    networks: int = 4
    hidden: int = 256
    training: Training = Training()  # noqa: RUF009 -- frozen
    validation_images: int = 500
    test_images: int = 500
    angles: tuple[int, ...] = tuple(range(0, 181, 15))
    shifted_from: int = 45
    focus_angle: int = 60
    example_angles: tuple[int, ...] = (0, 60, 90)
    bins: int = 10
    samples: int = 30

    @property
    def train_images(self) -> int:
        """The images that neither validation nor test takes."""
        return SIZE - self.validation_images - self.test_images

    @property
    def shifted_angles(self) -> tuple[int, ...]:
        """The angles that count as shifted."""
        return tuple(angle for angle in self.angles if angle >= self.shifted_from)

    @property
    def work(self) -> int:
        """The total of the progress bar."""
        return self.networks * (TRAINING_WORK + CALIBRATION_WORK + len(self.angles))


class Digits(NamedTuple):
    """The collection in three disjoint parts."""

    train: Labelled
    validation: Labelled
    test: Labelled


class Summary(NamedTuple):
    """A number for each network, in short."""

    mean: float
    spread: float  # standard deviation between networks; 0 for a single one


class Chosen(NamedTuple):
    """The settings that were chosen for a network, all on upright validation digits."""

    temperature: float
    equal_temperature: float
    bma_scale: float
    alpha: float
    table: str  # what `print(calibrated)` shows


class Run(NamedTuple):
    """The numbers of one network."""

    seed: int
    chosen: Chosen
    prices: Mapping[str, float]  # validation NLL of a method above that of the best temperature
    scores: Mapping[str, Mapping[int, Mapping[str, float]]]  # method -> angle -> score, test digits


@final
@dataclass(frozen=True)
class Findings:
    """All that the study has found, as plain numbers."""

    study: DemoStudy
    runs: tuple[Run, ...]
    diagrams: Mapping[str, Mapping[int, Diagram]]  # method -> 0 and the focus angle
    examples: tuple[Example, ...]  # of the first network

    def each(self, method: str, score: str, angles: tuple[int, ...]) -> list[float]:
        """Return the mean of a score over some angles, for every network."""
        return [fmean(run.scores[method][a][score] for a in angles) for run in self.runs]

    def upright(self, method: str, score: str) -> Summary:
        """Return a score on upright test digits."""
        return Summary(*mean_std(self.each(method, score, (0,))))

    def shifted(self, method: str, score: str) -> Summary:
        """Return a score on shifted test digits, the mean over their angles."""
        return Summary(*mean_std(self.each(method, score, self.study.shifted_angles)))

    def price(self, method: str) -> float:
        """Return the mean validation NLL of a method above that of the best temperature."""
        return fmean(run.prices[method] for run in self.runs)

    def curve(self, method: str, score: str) -> list[float]:
        """Return the mean of a score over all networks, for every angle."""
        return [fmean(self.each(method, score, (angle,))) for angle in self.study.angles]


class _Outcome(NamedTuple):
    """A network's numbers, and what pooled numbers are made of."""

    run: Run
    log_probs: dict[str, dict[int, Tensor]]  # method -> angle
    test: Labelled


@one_thread()
def run(study: DemoStudy, progress: Progress) -> Findings:
    """Train, calibrate and measure every network."""
    outcomes = []
    for i in range(study.networks):
        progress.stage(f"Network {i + 1} of {study.networks}")
        outcomes.append(_run_one(study, study.seed + i, progress))
    first = outcomes[0]
    return Findings(
        study=study,
        runs=tuple(outcome.run for outcome in outcomes),
        diagrams=_pooled_diagrams(study, outcomes),
        examples=first_different(first.log_probs, first.test, study.angles),
    )


def _run_one(study: DemoStudy, seed: int, progress: Progress) -> _Outcome:
    digits = digits_of(study, seed)
    network = small_network(study.hidden, seed)
    train(network, digits.train, study.training, seed)
    progress.advance(TRAINING_WORK)

    methods, chosen = compared(study, network, digits, seed)
    progress.advance(CALIBRATION_WORK)

    log_probs: dict[str, dict[int, Tensor]] = {method: {} for method in METHODS}
    for angle in study.angles:
        images = rotate(digits.test.inputs, angle)
        for method, predict in methods.items():
            log_probs[method][angle] = predict(images)
        progress.advance(1)
    scores = {
        method: {
            angle: scored(found, digits.test.labels, study.bins) for angle, found in by.items()
        }
        for method, by in log_probs.items()
    }
    return _Outcome(Run(seed, chosen, prices(methods, digits), scores), log_probs, digits.test)


def digits_of(study: DemoStudy, seed: int) -> Digits:
    """Split the digits at random; the same seed gives the same split."""
    sizes = study.train_images, study.validation_images, study.test_images
    return Digits(*split(all_digits(), sizes, seed))


def compared(
    study: DemoStudy, network: nn.Sequential, digits: Digits, seed: int
) -> tuple[dict[str, LogProbs], Chosen]:
    """Return every method, and its settings.

    BMA averages over a posterior of the tempered network's last layer. As fitted, this posterior
    costs BMA several times the price. So BMA has a scale of its own: the largest within the price.
    """
    with warnings.catch_warnings():  # its warnings are also in the table that the demo shows
        warnings.simplefilter("ignore", UserWarning)
        calibrated = acnml.calibrate(
            network, digits.train, digits.validation, price=PRICE, rule="acnml", progress=False
        )
    best = calibrated.temperature
    equal = calibrated.calibrator.temperature_of_equal_price

    def tempered(temperature: float) -> LogProbs:
        def log_probs(images: Tensor) -> Tensor:
            with torch.no_grad():
                return (network(images) / temperature).log_softmax(-1)

        return log_probs

    bma = averaged(study, network, best, digits.train, seed)
    limit = nll(tempered(best), digits.validation) + PRICE
    scale = Search(lambda scale: nll(bma(scale), digits.validation), limit).largest(limit)
    methods: dict[str, LogProbs] = {
        NETWORK: tempered(1.0),
        BEST: tempered(best),
        EQUAL: tempered(equal),
        BMA: bma(scale),
        ACNML: calibrated.log_probs,
    }
    return methods, Chosen(best, equal, scale, calibrated.alpha, str(calibrated))


def averaged(
    study: DemoStudy, network: nn.Sequential, temperature: float, data: Labelled, seed: int
) -> Callable[[float], LogProbs]:
    """Return BMA with a Laplace posterior of the last layer, as a function of its scale."""
    classifier = acnml.Classifier(network).tempered(temperature)
    posterior = acnml.fit_laplace(
        classifier, data, layers="last", prior_precision=PRIOR_PRECISION, progress=False
    )
    return lambda scale: acnml.Bma(classifier, posterior.scaled(scale), study.samples, seed)


def scored(log_probs: Tensor, labels: Tensor, bins: int) -> dict[str, float]:
    """Return scores by name; "confidence" is the mean probability of the predicted class."""
    confidence = log_probs.double().amax(1).exp().mean().item()
    return {**metrics.summary(log_probs, labels, bins), "confidence": confidence}


def nll(predict: LogProbs, data: Labelled) -> float:
    """Return the mean negative log-likelihood of the labels."""
    return metrics.nll(predict(data.inputs), data.labels)


def prices(methods: Mapping[str, LogProbs], digits: Digits) -> dict[str, float]:
    """Return the validation NLL of every method above that of the best temperature."""
    found = {method: nll(predict, digits.validation) for method, predict in methods.items()}
    return {method: value - found[BEST] for method, value in found.items()}


def _pooled_diagrams(study: DemoStudy, outcomes: list[_Outcome]) -> dict[str, dict[int, Diagram]]:
    """Return reliability diagrams of the test digits of all networks together."""
    labels = torch.cat([outcome.test.labels for outcome in outcomes])

    def diagram(method: str, angle: int) -> Diagram:
        log_probs = torch.cat([outcome.log_probs[method][angle] for outcome in outcomes])
        points = metrics.reliability(log_probs, labels, study.bins)
        return Diagram(tuple(points.confidence.tolist()), tuple(points.accuracy.tolist()))

    return {
        method: {angle: diagram(method, angle) for angle in (0, study.focus_angle)}
        for method in METHODS
    }
