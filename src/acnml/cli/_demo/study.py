"""The demo's study: MAP, BMA and ACNML on digits that turn away from the training data.

Data flows through four stages, each a function: train → fit → predict → measure. What comes out,
`Findings`, is plain numbers; tables, figures and the report are made from it elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar, final

from torch import Tensor

from acnml import (
    Acnml,
    Bma,
    Classifier,
    Gradient,
    Map,
    Predictor,
    Solver,
    fit_kfac_laplace,
    last_linear,
    metrics,
)
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
from acnml.cli._shared.digits import SIZE, Digits, Labelled, load_digits, rotate
from acnml.cli._shared.terminal import Progress, one_thread

METHODS = MAP, BMA, ACNML, LAST_LAYER = "MAP", "BMA", "ACNML", "ACNML last layer"
TUNED = (BMA, ACNML, LAST_LAYER)  # the methods that have a posterior, and so a prior precision

SGD = Training()
# The paper's iteration for KFAC. The memory is fixed because it decides how inputs are grouped, and
# that shows in the last digits.
PAPER_STEPS = Gradient(steps=10, step_size=0.25, memory=2**27)

T = TypeVar("T")
Build: TypeAlias = Callable[[float], Predictor]  # prior precision -> predictor


@final
@dataclass(frozen=True)
class DemoStudy:
    """The settings of the study.

    Args:
        seed: of the split, the initial weights, the batches and BMA's samples.
        validation_images: images on which prior precisions are chosen.
        test_images: images that every method sees at every angle.
        angles: turns in degrees, upright (0) first.
        focus_angle: the turn that diagrams and the trade-off are drawn for.
        table_angles: the turns that the table and the examples show.
        prior_precisions: τ to try, in increasing order; the chosen one may lie between two.
        tolerance: by how many nats the validation NLL may exceed that of MAP.
        bins: bins of equal mass of ECE and reliability diagrams; 20 would be noisy for so few
            images.
        samples: posterior samples of BMA.
    """

    seed: int = 0
    hidden: int = 32
    training: Training = SGD
    validation_images: int = 300
    test_images: int = 500
    angles: tuple[int, ...] = tuple(range(0, 181, 15))
    focus_angle: int = 60
    table_angles: tuple[int, ...] = (0, 60, 90)
    prior_precisions: tuple[float, ...] = (0.1, 0.3, 1, 3, 10, 30, 100)
    tolerance: float = 0.2
    bins: int = 10
    samples: int = 30
    solver: Solver = PAPER_STEPS

    def __post_init__(self) -> None:
        if self.angles[0] != 0 or not {self.focus_angle, *self.table_angles} <= set(self.angles):
            raise ValueError("angles must begin with 0 and contain focus_angle and table_angles")
        if list(self.prior_precisions) != sorted(self.prior_precisions):
            raise ValueError("prior_precisions must increase")

    @property
    def train_images(self) -> int:
        """The images that neither validation nor test takes."""
        return SIZE - self.validation_images - self.test_images

    @property
    def trial_work(self) -> int:
        """Images that every method predicts for one prior precision."""
        return self.validation_images + self.test_images

    @property
    def work(self) -> int:
        """Images that every method predicts in the whole study: a measure of its duration."""
        tries = len(self.prior_precisions) + 1  # and the chosen one
        return tries * self.trial_work + len(self.angles) * self.test_images


class Trial(NamedTuple):
    """What one prior precision would cost, and what it would buy."""

    prior_precision: float
    validation_nll: float  # upright validation images: the choice is made on this alone
    turned_ece: float  # test images at the focus angle: reported, never used to choose


class Fitted(NamedTuple):
    """Every method, ready to predict, and how its prior precision was chosen."""

    predictors: Mapping[str, Predictor]
    map_trial: Trial  # MAP, the limit of an infinite prior precision
    trials: Mapping[str, tuple[Trial, ...]]  # of every tuned method
    chosen: Mapping[str, Trial]  # by `choose`, on the validation images


@final
@dataclass(frozen=True)
class Findings:
    """All that the study has found, as plain numbers."""

    study: DemoStudy
    map_trial: Trial  # these three as in `Fitted`
    trials: Mapping[str, tuple[Trial, ...]]
    chosen: Mapping[str, Trial]
    scores: Mapping[str, Mapping[int, Scores]]  # method -> angle
    diagrams: Mapping[str, Mapping[int, tuple[Bin, ...]]]  # method -> angle
    examples: tuple[Example, ...]

    def turned(self, method: str, score: str) -> float:
        """Return the mean of a score over all angles but 0."""
        values = [getattr(self.scores[method][angle], score) for angle in self.study.angles[1:]]
        return float(sum(values) / len(values))


@one_thread()
def run(study: DemoStudy, progress: Progress) -> Findings:
    """Run all stages."""
    progress.stage("Training the network")
    digits = load_digits(study.validation_images, study.test_images, study.seed)
    classifier = train_classifier(study, digits.train)
    progress.stage("Fitting and tuning posteriors")
    fitted = fit(study, classifier, digits, progress)
    progress.stage("Predicting turned digits")
    predictions = predict(study, fitted.predictors, digits.test, progress)
    return measure(study, fitted, predictions, digits.test)


# Train -----------------------------------------------------------------------------------------


def train_classifier(study: DemoStudy, data: Labelled) -> Classifier:
    """Train the one network that all methods share."""
    network = small_network(study.hidden, study.seed)
    train(network, data, study.training, study.seed)
    return Classifier(network)


# Fit -------------------------------------------------------------------------------------------


def fit(study: DemoStudy, classifier: Classifier, digits: Digits, progress: Progress) -> Fitted:
    """Fit every method's posterior, with the prior precision that `choose` finds for it."""
    builds = posterior_builds(study, classifier, digits.train)
    trials = try_prior_precisions(study, builds, digits, progress)
    map_trial = trial(study, Map(classifier), math.inf, digits)
    budget = map_trial.validation_nll + study.tolerance
    choice = {method: choose(trials[method], budget) for method in TUNED}
    tuned = {method: builds[method](choice[method]) for method in TUNED}
    chosen = {method: trial(study, tuned[method], choice[method], digits) for method in TUNED}
    progress.advance(study.trial_work)
    return Fitted({MAP: Map(classifier), **tuned}, map_trial, trials, chosen)


def posterior_builds(study: DemoStudy, classifier: Classifier, data: Labelled) -> dict[str, Build]:
    """Return, for every tuned method, how a prior precision makes a predictor."""

    def bma(prior_precision: float) -> Predictor:
        posterior = fit_kfac_laplace(classifier, [data], prior_precision, progress=False)
        return Bma(classifier, posterior, study.samples, study.seed)

    def acnml(prior_precision: float) -> Predictor:
        posterior = fit_kfac_laplace(classifier, [data], prior_precision, progress=False)
        return Acnml(classifier, posterior, study.solver)

    def acnml_last_layer(prior_precision: float) -> Predictor:
        head = [last_linear(classifier.model)]
        posterior = fit_kfac_laplace(classifier, [data], prior_precision, head, progress=False)
        return Acnml(classifier, posterior, study.solver)

    return {BMA: bma, ACNML: acnml, LAST_LAYER: acnml_last_layer}


def try_prior_precisions(
    study: DemoStudy, builds: Mapping[str, Build], digits: Digits, progress: Progress
) -> dict[str, tuple[Trial, ...]]:
    """Try every prior precision for every method."""
    trials: dict[str, list[Trial]] = {method: [] for method in builds}
    for prior_precision in study.prior_precisions:
        for method, build in builds.items():
            trials[method].append(trial(study, build(prior_precision), prior_precision, digits))
        progress.advance(study.trial_work)
    return {method: tuple(tried) for method, tried in trials.items()}


def trial(study: DemoStudy, predictor: Predictor, prior_precision: float, digits: Digits) -> Trial:
    """Measure a predictor on upright validation images and on turned test images."""
    upright, turned = digits.validation, rotate(digits.test.inputs, study.focus_angle)
    return Trial(
        prior_precision=prior_precision,
        validation_nll=metrics.nll(predictor(upright.inputs), upright.labels),
        turned_ece=metrics.ece(predictor(turned), digits.test.labels, study.bins),
    )


def choose(trials: tuple[Trial, ...], budget: float) -> float:
    """Return the smallest prior precision whose validation NLL is within the budget.

    The smallest is the widest posterior. Between two that were tried, log NLL is interpolated
    linearly in log τ, so that all methods come to pay nearly the same price and none is lucky in
    the grid. Where no trial is in budget it is the largest τ, the one closest to MAP.
    """
    inside = next((i for i, t in enumerate(trials) if t.validation_nll <= budget), len(trials) - 1)
    if inside == 0 or trials[inside].validation_nll > budget:
        return trials[inside].prior_precision
    above, below = trials[inside - 1], trials[inside]
    fall = math.log(above.validation_nll / below.validation_nll)
    share = math.log(above.validation_nll / budget) / fall
    ratio = below.prior_precision / above.prior_precision
    return above.prior_precision * float(ratio**share)


# Predict ---------------------------------------------------------------------------------------


def predict(
    study: DemoStudy, predictors: Mapping[str, Predictor], test: Labelled, progress: Progress
) -> Predictions:
    """Let every method see the test images at every angle."""
    predictions: dict[str, dict[int, Tensor]] = {method: {} for method in predictors}
    for angle in study.angles:
        images = rotate(test.inputs, angle)
        for method, predictor in predictors.items():
            predictions[method][angle] = predictor(images)
        progress.advance(study.test_images)
    return predictions


# Measure ---------------------------------------------------------------------------------------


def measure(study: DemoStudy, fitted: Fitted, predictions: Predictions, test: Labelled) -> Findings:
    """Turn predictions into plain numbers."""
    return Findings(
        study=study,
        map_trial=fitted.map_trial,
        trials=fitted.trials,
        chosen=fitted.chosen,
        scores=measure_each(predictions, partial(score, labels=test.labels, bins=study.bins)),
        diagrams=measure_each(predictions, partial(diagram, labels=test.labels, bins=study.bins)),
        examples=first_different(predictions, test, study.angles),
    )


def measure_each(
    predictions: Predictions, function: Callable[[Tensor], T]
) -> dict[str, dict[int, T]]:
    """Apply a function to every method's log-probabilities at every angle."""
    return {
        method: {angle: function(log_probs) for angle, log_probs in by_angle.items()}
        for method, by_angle in predictions.items()
    }
