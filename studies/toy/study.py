"""The toy study: exact CNML and CNMAP on points in the plane, and what approximates them.

The paper's figures 1 to 3 are about linearly separable classes. Everything is shown for such a
sample; exact CNML and CNMAP also for a second one, whose classes overlap, where they behave
differently. Every map is the probability of class 1 on a square grid around the data. What comes
out, `Findings`, is numbers; figures and the report are made from it elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml import Acnml, Bma, Linearised, Map
from acnml.exact import LogisticProblem, cnml, fit, laplace, with_intercept
from acnml.predictors import Predictor
from studies.terminal import Progress, one_thread

METHODS = CNMAP, ACNML, BMA, MAP = "CNMAP", "ACNML", "BMA", "MAP"
CNML = "CNML"  # CNMAP without a penalty
# Exact for a logistic regression, whose logits are linear; a few points take many Newton steps.
SOLVER = Linearised(tolerance=1e-6)
VANISHING = 1e-4  # λ where a fit is shown that has no finite maximum without a penalty
WHITE = 0.6  # below this confidence a point of a map looks white


@final
@dataclass(frozen=True)
class ToyStudy:
    """The settings of the study.

    Args:
        seed: of the points and of BMA's samples.
        points: training points, half of each class.
        apart: distance of the classes' centres, in standard deviations, for the main sample, which
            many lines should part.
        overlapping: the same, for the second sample, which no line should part.
        extent: the maps reach from -extent to extent in both directions.
        resolution: of the maps, in points along a side: about the pixels of a figure, so that
            edges of CNML, which jumps, have no steps.
        query: where the two refits are shown.
        penalties: λ of CNMAP, in increasing order. The intercept is not penalised.
        distances: radii of the rings on which confidence is averaged, in increasing order.
        samples: posterior samples of BMA.
    """

    seed: int = 0
    points: int = 40
    apart: float = 6.0
    overlapping: float = 2.2
    extent: float = 8.0
    resolution: int = 300
    query: tuple[float, float] = (4.5, -5.0)
    penalties: tuple[float, ...] = (0.1, 1.0, 10.0)
    distances: tuple[float, ...] = (2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
    samples: int = 200

    def __post_init__(self) -> None:
        if list(self.penalties) != sorted(self.penalties) or self.penalties[0] <= 0:
            raise ValueError("penalties must be positive and increase")

    @property
    def ring_penalty(self) -> float:
        """The λ that methods have on the rings: the middle one."""
        return self.penalties[len(self.penalties) // 2]

    @property
    def work(self) -> int:
        """Maps that are computed: a measure of the study's duration."""
        return 2 + (1 + len(METHODS)) * len(self.penalties)


class Sample(NamedTuple):
    """Training points in the plane."""

    points: Tensor  # (n, 2)
    labels: Tensor  # (n,)


class ExactMap(NamedTuple):
    """CNML or CNMAP on the grid."""

    probability: Tensor  # (resolution, resolution) of class 1; rows are heights
    normaliser: Tensor  # (resolution, resolution) C(x), from 1 to 2
    limits: float  # the share of refits without a finite maximum
    unconverged: int  # refits that did not converge

    @property
    def confidence(self) -> float:
        """The mean of the larger probability."""
        return confidence(self.probability).mean().item()

    @property
    def white(self) -> float:
        """The share of the map where neither class is preferred."""
        return (confidence(self.probability) < WHITE).double().mean().item()

    @property
    def mean_normaliser(self) -> float:
        """The mean of C(x)."""
        return self.normaliser.mean().item()


ExactMaps = Mapping[float, ExactMap]  # λ -> CNMAP, with CNML at 0


def confidence(probability: Tensor) -> Tensor:
    """Return the larger of the two probabilities."""
    return torch.maximum(probability, 1 - probability)


class QueryFit(NamedTuple):
    """One model of the second figure: fitted to the data, or to the data and the query.

    A line that parts all points has no likeliest slope. The penalty is therefore not 0 but
    `VANISHING`, with which the line tends to the one of the largest margin.
    """

    probability: Tensor  # (resolution, resolution) of class 1
    at_query: tuple[float, float]  # of both classes, at the query


@final
@dataclass(frozen=True, eq=False)
class Findings:
    """All that the study has found."""

    study: ToyStudy
    sample: Sample
    overlapping_sample: Sample
    exact: ExactMaps
    overlapping: ExactMaps  # of the second sample
    trained: QueryFit
    refits: tuple[QueryFit, QueryFit]  # with the query in class 0, and in class 1
    cnml_at_query: tuple[float, float]  # of both classes
    maps: Mapping[str, Mapping[float, Tensor]]  # method -> λ -> probability of class 1
    rings: Mapping[str, tuple[float, ...]]  # method -> mean confidence at every distance

    def confidence(self, method: str, l2: float) -> float:
        """Return a method's mean confidence over the map."""
        return confidence(self.maps[method][l2]).mean().item()

    def distance(self, method: str, l2: float) -> float:
        """Return a method's mean distance to CNMAP over the map, in probability."""
        return (self.maps[method][l2] - self.maps[CNMAP][l2]).abs().mean().item()


@one_thread()
def run(study: ToyStudy, progress: Progress) -> Findings:
    """Run all stages."""
    progress.stage("CNML and CNMAP on two samples")
    sample, other = (draw(study, distance) for distance in (study.apart, study.overlapping))
    exact, overlapping = (
        {l2: exact_map(study, each, l2, progress) for l2 in (0.0, *study.penalties)}
        for each in (sample, other)
    )
    queried = query_fits(study, sample)
    progress.stage("ACNML, BMA and MAP")
    maps = {CNMAP: {l2: exact[l2].probability for l2 in study.penalties}}
    maps |= approximate_maps(study, sample, progress)
    progress.stage("Further and further away")
    found = rings(study, sample)
    return Findings(study, sample, other, exact, overlapping, *queried, maps, found)


# Data ------------------------------------------------------------------------------------------


def draw(study: ToyStudy, distance: float) -> Sample:
    """Draw two round clouds of points, on a rising diagonal and so far apart."""
    generator = torch.Generator().manual_seed(study.seed)
    noise = torch.randn(study.points, 2, generator=generator, dtype=torch.float64)
    labels = torch.arange(study.points) % 2
    side = (2 * labels - 1).unsqueeze(-1) * distance / 2
    return Sample(noise + side / math.sqrt(2), labels)


def grid(study: ToyStudy) -> Tensor:
    """Return the features of the maps' points (cells, 3), line by line from below."""
    axis = torch.linspace(-study.extent, study.extent, study.resolution, dtype=torch.float64)
    height, across = torch.meshgrid(axis, axis, indexing="ij")
    return with_intercept(torch.stack([across, height], dim=-1).flatten(0, 1))


def ring(distance: float) -> Tensor:
    """Return the features of points (60, 3) that far from the middle, in all directions."""
    angle = torch.arange(60, dtype=torch.float64) * math.tau / 60
    return with_intercept(distance * torch.stack([angle.cos(), angle.sin()], dim=-1))


def problem(sample: Sample, l2: float) -> LogisticProblem:
    """Return a logistic regression with an intercept that is not penalised."""
    penalty = torch.tensor([l2, l2, 0.0])
    return LogisticProblem(with_intercept(sample.points), sample.labels, penalty)


# Maps ------------------------------------------------------------------------------------------


def exact_map(study: ToyStudy, sample: Sample, l2: float, progress: Progress) -> ExactMap:
    """Refit at every point of the grid, with both labels."""
    refits = cnml(problem(sample, l2), grid(study))
    progress.advance(1)
    return ExactMap(
        as_map(study, refits.log_probs),
        refits.regret.exp().view(study.resolution, -1),
        refits.limit.double().mean().item(),
        int((~refits.converged).sum()),
    )


def approximate_maps(
    study: ToyStudy, sample: Sample, progress: Progress
) -> dict[str, dict[float, Tensor]]:
    """Map the methods that need no refits, for every penalty."""
    maps: dict[str, dict[float, Tensor]] = {ACNML: {}, BMA: {}, MAP: {}}
    for l2 in study.penalties:
        for method, predict in predictors(study, sample, l2).items():
            maps[method][l2] = as_map(study, predict(grid(study)))
            progress.advance(1)
    return maps


def predictors(study: ToyStudy, sample: Sample, l2: float) -> dict[str, Predictor]:
    """Return the methods that need no refits, around the Laplace posterior."""
    fitted = laplace(problem(sample, l2))
    return {
        ACNML: Acnml(fitted.classifier, fitted.posterior, SOLVER),
        BMA: Bma(fitted.classifier, fitted.posterior, study.samples, study.seed),
        MAP: Map(fitted.classifier),
    }


def as_map(study: ToyStudy, log_probs: Tensor) -> Tensor:
    """Return the probability of class 1 (resolution, resolution) from log-probabilities."""
    return log_probs[:, 1].exp().view(study.resolution, -1)


# Two refits ------------------------------------------------------------------------------------


def query_fits(
    study: ToyStudy, sample: Sample
) -> tuple[QueryFit, tuple[QueryFit, QueryFit], tuple[float, float]]:
    """Fit the data, and the data with the query in either class.

    The third is what CNML, without any penalty, makes of the query.
    """
    query = with_intercept(torch.tensor([study.query], dtype=torch.float64))
    nearly = problem(sample, VANISHING)
    trained, refitted = fit(nearly).weights, cnml(nearly, query).weights[0]
    first, second = (_query_fit(study, query, weights) for weights in refitted)
    orange, blue = cnml(problem(sample, 0.0), query).log_probs[0].exp().tolist()
    return _query_fit(study, query, trained), (first, second), (orange, blue)


def _query_fit(study: ToyStudy, query: Tensor, weights: Tensor) -> QueryFit:
    log_probs = torch.log_softmax(torch.cat([query, grid(study)]) @ weights.mT, dim=-1)
    first, second = log_probs[0].exp().tolist()
    return QueryFit(as_map(study, log_probs[1:]), (first, second))


# Rings -----------------------------------------------------------------------------------------


def rings(study: ToyStudy, sample: Sample) -> dict[str, tuple[float, ...]]:
    """Return every method's mean confidence, the larger probability, at every distance."""
    l2 = study.ring_penalty
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        CNML: lambda x: cnml(problem(sample, 0.0), x).log_probs,
        CNMAP: lambda x: cnml(problem(sample, l2), x).log_probs,
        **predictors(study, sample, l2),
    }
    return {
        method: tuple(predict(ring(r)).amax(-1).exp().mean().item() for r in study.distances)
        for method, predict in methods.items()
    }
