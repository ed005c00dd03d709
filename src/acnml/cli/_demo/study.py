"""The demo's study: `acnml.calibrate` and its rivals on rotated digits.

A few networks are trained, each from another seed and on another split of the data. For each of
them: train → calibrate → predict. The predictions are then measured together. The result,
`Findings`, is plain numbers; tables, figures and the report are made from it elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from acnml import Bma, Calibrated, Classifier, Map, Predictor, calibrate, metrics, tuning
from acnml.cli._demo.measurement import (
    Bin,
    Example,
    Predictions,
    Scores,
    diagram,
    first_different,
    score,
)
from acnml.cli._demo.training import Training, small_network, train
from acnml.cli._shared.digits import SIZE, Digits, load_digits, rotate
from acnml.cli._shared.terminal import Progress, one_thread

PRICE = 0.01  # the default of `calibrate`, which names methods here as it does in its own table
METHODS = NETWORK, BEST, EQUAL, BMA, ACNML = (
    "network",
    "temperature",
    f"temperature, +{PRICE:g}",
    f"BMA, +{PRICE:g}",
    f"ACNML, +{PRICE:g}",
)
RIVALS = (EQUAL, BMA)  # what pays the same price as ACNML

# Scales of the covariance for BMA, the most cautious first. `within_price` refines between them.
SCALES = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 1e-4)

# Shares of the progress bar; an angle is 1.
TRAINING_WORK, CALIBRATION_WORK = 6, 16


@final
@dataclass(frozen=True)
class DemoStudy:
    """The settings of the study.

    Args:
        seed: of the first network: of its split, initial weights, batches and BMA's samples.
        networks: how many are trained, with the seeds that follow.
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

    def __post_init__(self) -> None:
        if self.angles[0] != 0 or not {self.focus_angle, *self.example_angles} <= set(self.angles):
            raise ValueError("angles must begin with 0 and contain focus_angle and example_angles")
        if not self.shifted_angles or self.shifted_from <= 0:
            raise ValueError("shifted_from must be above 0 and at most the largest angle")
        if self.networks < 1:
            raise ValueError(f"networks must be at least 1, got {self.networks}")

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


class Summary(NamedTuple):
    """A number for each network, in short."""

    mean: float
    spread: float  # standard deviation between networks; 0 for a single one

    @staticmethod
    def of(values: list[float]) -> Summary:
        return Summary(fmean(values), stdev(values) if len(values) > 1 else 0.0)


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
    scores: Mapping[str, Mapping[int, Scores]]  # method -> angle, on test digits


@final
@dataclass(frozen=True)
class Findings:
    """All that the study has found, as plain numbers."""

    study: DemoStudy
    runs: tuple[Run, ...]
    diagrams: Mapping[str, Mapping[int, tuple[Bin, ...]]]  # method -> 0 and the focus angle
    examples: tuple[Example, ...]  # of the first network

    def each(self, method: str, score: str, angles: tuple[int, ...]) -> list[float]:
        """Return the mean of a score over some angles, for every network."""
        return [fmean(getattr(run.scores[method][a], score) for a in angles) for run in self.runs]

    def upright(self, method: str, score: str) -> Summary:
        """Return a score on upright test digits."""
        return Summary.of(self.each(method, score, (0,)))

    def shifted(self, method: str, score: str) -> Summary:
        """Return a score on shifted test digits, the mean over their angles."""
        return Summary.of(self.each(method, score, self.study.shifted_angles))

    def price(self, method: str) -> Summary:
        """Return the validation NLL of a method above that of the best temperature."""
        return Summary.of([run.prices[method] for run in self.runs])

    def curve(self, method: str, score: str) -> list[float]:
        """Return the mean of a score over all networks, for every angle."""
        return [fmean(self.each(method, score, (angle,))) for angle in self.study.angles]


class _Outcome(NamedTuple):
    """A network's numbers, and what pooled numbers are made of."""

    run: Run
    predictions: Predictions
    digits: Digits


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
        examples=first_different(first.predictions, first.digits.test, study.angles),
    )


def _run_one(study: DemoStudy, seed: int, progress: Progress) -> _Outcome:
    digits = load_digits(study.validation_images, study.test_images, seed)
    network = small_network(study.hidden, seed)
    train(network, digits.train, study.training, seed)
    progress.advance(TRAINING_WORK)

    calibrated = _calibrated(network, digits)
    predictors, chosen = compared(study, Classifier(network), calibrated, digits, seed)
    progress.advance(CALIBRATION_WORK)

    predictions: dict[str, dict[int, Tensor]] = {method: {} for method in METHODS}
    labels = digits.test.labels
    for angle in study.angles:
        images = rotate(digits.test.inputs, angle)
        for method, predictor in predictors.items():
            predictions[method][angle] = predictor(images)
        progress.advance(1)
    scores = {
        method: {angle: score(log_probs, labels, study.bins) for angle, log_probs in by.items()}
        for method, by in predictions.items()
    }
    run = Run(seed, chosen, prices(predictors, digits), scores)
    return _Outcome(run, predictions, digits)


def _calibrated(network: nn.Module, digits: Digits) -> Calibrated:
    with warnings.catch_warnings():  # its warnings are also in the table that the demo shows
        warnings.simplefilter("ignore", UserWarning)
        return calibrate(network, [digits.train], [digits.validation], progress=False)


def compared(
    study: DemoStudy, classifier: Classifier, calibrated: Calibrated, digits: Digits, seed: int
) -> tuple[dict[str, Predictor], Chosen]:
    """Return every method, and its settings.

    BMA averages over the posterior of ACNML. At its own scale this posterior costs BMA several
    times the price, at ACNML's α a fraction of it. Neither would be a fair comparison, so BMA has a
    scale of its own: the largest within the price.
    """
    equal = calibrated.temperature_of_equal_price
    tempered, posterior = calibrated.classifier, calibrated.predictor.posterior

    def bma(scale: float) -> Predictor:
        return Bma(tempered, posterior.scaled(scale), study.samples, seed)

    scale = tuning.within_price(
        bma, SCALES, [digits.validation], calibrated.price, Map(tempered), progress=False
    ).value
    predictors = {
        NETWORK: Map(classifier),
        BEST: Map(tempered),
        EQUAL: Map(classifier.tempered(equal)),
        BMA: bma(scale),
        ACNML: calibrated,
    }
    chosen = Chosen(calibrated.temperature, equal, scale, calibrated.alpha, str(calibrated))
    return predictors, chosen


def prices(predictors: Mapping[str, Predictor], digits: Digits) -> dict[str, float]:
    """Return the validation NLL of every method above that of the best temperature."""
    upright = digits.validation
    nll = {m: metrics.nll(p(upright.inputs), upright.labels) for m, p in predictors.items()}
    return {method: value - nll[BEST] for method, value in nll.items()}


def _pooled_diagrams(
    study: DemoStudy, outcomes: list[_Outcome]
) -> dict[str, dict[int, tuple[Bin, ...]]]:
    """Return reliability diagrams of the test digits of all networks together."""
    labels = torch.cat([outcome.digits.test.labels for outcome in outcomes])
    return {
        method: {
            angle: diagram(
                torch.cat([outcome.predictions[method][angle] for outcome in outcomes]),
                labels,
                study.bins,
            )
            for angle in (0, study.focus_angle)
        }
        for method in METHODS
    }
