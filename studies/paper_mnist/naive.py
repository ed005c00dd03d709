"""ACNML and naive CNML for the same queries, as in appendix C of the paper.

Both start from the mean of one Bayes-by-Backprop posterior. ACNML takes the paper's five steps on
the query and the posterior. Naive CNML trains for some epochs on the query and the training data,
once for every label; its variant `max` takes the highest likelihood of the last epoch. MAP and BMA
stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from acnml import Acnml
from acnml.fit import Refit
from acnml.fit.refitting import refit_each
from studies.engine.grounds import Batches, MeanField
from studies.engine.method import ACNML, ALPHA, BMA, MAP, PAPER_STEPS, SCALE, Method
from studies.engine.predict import Predictions
from studies.engine.predictors import log_probs_of, outputs, predictor
from studies.engine.study import StudyData
from studies.engine.workshop import Workshop
from studies.paper_mnist.settings import NaiveCnml
from studies.rotated_mnist.settings import UPRIGHT
from studies.store import Artefact, Content, Stage, Work
from studies.store.work import Compute

NAIVE, NAIVE_MAX = "naive CNML", "naive CNML (max)"
MOMENTUM = 0.9


class Comparison(NamedTuple):
    """What all methods make of the queries of one shift.

    `log_lik` has log p_θ̂_y(y|x) (B, K) before it is normalised, and for MAP and BMA the
    log-probabilities.
    """

    shift: str
    labels: Tensor
    log_lik: Mapping[str, Tensor]  # by method: MAP, BMA, ACNML, naive CNML and its maximum

    def log_probs(self, method: str) -> Tensor:
        """Return log-probabilities (B, K)."""
        return torch.log_softmax(self.log_lik[method].double(), dim=-1)

    def normaliser(self, method: str) -> Tensor:
        """Return C(x) = Σ_y p_θ̂_y(y|x) (B,)."""
        return self.log_lik[method].double().exp().sum(1)

    def confidence(self, method: str) -> Tensor:
        """Return the largest probability (B,)."""
        return self.log_probs(method).amax(1).exp()

    def nll(self, method: str) -> Tensor:
        """Return the NLL of the true labels (B,)."""
        return -self.log_probs(method).gather(1, self.labels[:, None])[:, 0]

    def first(self, count: int) -> Comparison:
        """Return the comparison for the first queries."""
        return Comparison(
            self.shift, self.labels[:count], {m: t[:count] for m, t in self.log_lik.items()}
        )


class Match(NamedTuple):
    """An α and the mean absolute difference of ACNML's likelihoods to those of naive CNML."""

    alpha: float
    distance: float


class Compared(NamedTuple):
    """All comparisons around one posterior, by shift, and α matched on the upright queries."""

    settings: NaiveCnml
    train_images: int
    shifts: Mapping[str, Comparison]
    matches: tuple[Match, ...]
    seconds: Mapping[str, float]  # of one prediction, for ACNML and naive CNML


def methods(ground: str) -> dict[str, Method]:
    """Return what stands beside naive CNML."""
    return {
        MAP: Method(MAP, ground),
        BMA: Method(BMA, ground, knob=SCALE),
        ACNML: Method(ACNML, ground, PAPER_STEPS, ALPHA),
    }


def compare_all(workshop: Workshop, ground: str, settings: NaiveCnml) -> Compared:
    """Compare at all shifts."""
    shifts: dict[str, Comparison] = {}
    seconds: dict[str, float] = {}
    for shift, count in settings.queries.items():
        shifts[shift], took = compare(workshop, ground, settings, shift, count)
        seconds = {m: min(s, seconds.get(m, s)) for m, s in took.items()}
    matches = match(workshop, ground, settings, shifts[UPRIGHT])
    images = len(workshop.train_data(_mean_field(workshop, ground).network).labels)
    return Compared(settings, images, shifts, matches, seconds)


def compare(
    workshop: Workshop, ground: str, settings: NaiveCnml, shift: str, count: int
) -> tuple[Comparison, dict[str, float]]:
    """Let all methods see the same queries; also return the seconds of a prediction."""
    data: StudyData = workshop.data
    count = data.count(count)
    queries = data.load(shift, count)
    needs = _needs(workshop, ground)
    what, found, seconds = (shift, count, data.checksum), {}, {}
    for name, method in methods(ground).items():
        stage = Stage(
            f"compare {name} {ground} {shift}",
            (method, what, workshop.study.samples),
            workshop.seed,
            needs=needs,
        )

        def amortised(method: Method = method) -> Compute:
            built = predictor(method, workshop)
            return lambda rows: outputs(built, queries.inputs[rows], method)

        made = workshop.artefacts.predict(stage, count, count, amortised)
        saved = made.load()
        found[name] = saved["log_lik"] if "log_lik" in saved else log_probs_of(saved)
        seconds[name] = made.seconds / count

    slow = naive_cnml(workshop, ground, settings, shift, queries.inputs)
    loaded = slow.load()
    each = {**found, NAIVE: loaded["last"], NAIVE_MAX: loaded["best"]}
    return Comparison(shift, queries.labels, each), {**seconds, NAIVE: slow.seconds_per_input}


def naive_cnml(
    workshop: Workshop, ground: str, settings: NaiveCnml, shift: str, queries: Tensor
) -> Predictions:
    """Train again for the first queries of a shift.

    Every query is a stage of its own: a run for more queries goes on where one for fewer ended.
    """
    stages = naive_stages(workshop, ground, settings, shift, len(queries))

    def one(number: int) -> Artefact:
        def prepare() -> Compute:
            return _refitted(workshop, ground, settings, queries[number : number + 1])

        return workshop.artefacts.predict(stages[number], 1, 1, prepare)

    return Predictions(tuple(one(number) for number in range(len(queries))))


def naive_stages(
    workshop: Workshop, ground: str, settings: NaiveCnml, shift: str, count: int
) -> tuple[Stage, ...]:
    """Return the stages of naive CNML for the first queries of a shift."""
    decay = () if settings.weight_decay is None else (settings.weight_decay,)
    refit = (settings.epochs, settings.learning_rate, settings.batch_size, *decay)
    needs = _needs(workshop, ground)
    return tuple(
        Stage(
            f"compare naive CNML {ground} {shift} query {number}",
            (refit, shift, number, workshop.data.checksum),
            workshop.seed,
            needs=needs,
        )
        for number in range(count)
    )


def _refitted(workshop: Workshop, ground: str, settings: NaiveCnml, queries: Tensor) -> Compute:
    """Return what trains again for some queries."""
    mean_field = _mean_field(workshop, ground)
    ((classifier, _),) = mean_field.pairs(_plain(ground), workshop)
    train = workshop.train_data(mean_field.network)
    decay = settings.weight_decay
    if decay is None:
        decay = 1 / (len(train.labels) * mean_field.training.prior_std**2)
    refit = Refit(settings.epochs, settings.learning_rate, MOMENTUM, decay)
    batches = Batches(train, workshop, mean_field.network, settings.batch_size)

    def compute(rows: slice) -> dict[str, Tensor]:
        each = list(refit_each(classifier, batches, queries[rows], refit, progress=False))
        last, best = (torch.stack(list(part)) for part in zip(*each, strict=True))
        return {"last": last, "best": best}

    return compute


def match(
    workshop: Workshop, ground: str, settings: NaiveCnml, upright: Comparison
) -> tuple[Match, ...]:
    """Measure for every α how close ACNML is to naive CNML: the first rule that the paper names."""
    alphas, expected = workshop.study.settings.alphas, upright.log_lik[NAIVE]
    naive = naive_stages(workshop, ground, settings, UPRIGHT, len(upright.labels))
    stage = Stage(f"match alpha {ground}", alphas, workshop.seed, needs=naive)

    def make(_: Work) -> Content:
        built = cast("Acnml", predictor(methods(ground)[ACNML], workshop))
        queries = workshop.data.load(UPRIGHT, len(upright.labels)).inputs

        def distance(alpha: float) -> float:
            log_lik = replace(built, alpha=alpha).log_lik(queries).double().cpu()
            return float((log_lik.exp() - expected.double().exp()).abs().mean())

        return Content({}, {"table": [[alpha, distance(alpha)] for alpha in sorted(alphas)]})

    return tuple(Match(*row) for row in workshop.make(stage, make).facts["table"])


def _needs(workshop: Workshop, ground: str) -> tuple[Stage, ...]:
    """Return the stages of the posterior."""
    fitted = _mean_field(workshop, ground).artefacts(_plain(ground), workshop)
    return tuple(artefact.stage for artefact in fitted)


def _mean_field(workshop: Workshop, ground: str) -> MeanField:
    found = workshop.study.grounds[ground]
    assert isinstance(found, MeanField)  # the study has no others
    return found


def _plain(ground: str) -> Method:
    return methods(ground)[MAP]
