"""The toy study: exact CNML and CNMAP on points in the plane, and what approximates them.

Every map is the probability of class 1 on a square grid around the data. What comes out,
`Findings`, is numbers; figures and the report are made from it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from acnml import Acnml, Bma, Linearised, Map, Predictor
from acnml.exact import LogisticProblem, Refits, cnml, fit, laplace, with_intercept
from acnml.experiments.demo.study import one_thread

METHODS = CNMAP, ACNML, BMA, MAP = "CNMAP", "ACNML", "BMA", "MAP"
# Exact for a logistic regression; far from the data the steps are many.
EXACTLY = Linearised(tolerance=1e-9, newton_steps=500)
UNDECIDED = 0.1  # a probability within this of one half is called undecided


@final
@dataclass(frozen=True)
class ToyStudy:
    """The settings of the study.

    Args:
        seed: of the points and of BMA's samples.
        points: training points, half of each class.
        overlapping: distance of the classes' centres, in standard deviations, so that no line
            parts them.
        apart: the same, so that many lines do.
        extent: the maps reach from -extent to extent in both directions.
        resolution: of the maps, in points along a side.
        query: where the two refits are shown.
        penalties: λ of CNMAP, in increasing order. The intercept is not penalised.
        samples: posterior samples of BMA.
    """

    seed: int = 0
    points: int = 40
    overlapping: float = 3.0
    apart: float = 6.0
    extent: float = 8.0
    resolution: int = 100
    query: tuple[float, float] = (4.5, -5.0)
    penalties: tuple[float, ...] = (0.1, 1.0, 10.0)
    samples: int = 200

    @property
    def cells(self) -> int:
        """Grid points of a map."""
        return self.resolution**2

    @property
    def work(self) -> int:
        """Maps that are computed: a measure of the study's duration."""
        return 2 + len(METHODS) * len(self.penalties)


class Progress(Protocol):
    """Hears what the study is doing and how far it is."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def advance(self, maps: int) -> None:
        """These many maps more are done."""


class Sample(NamedTuple):
    """Training points in the plane."""

    points: Tensor  # (n, 2)
    labels: Tensor  # (n,)


class ExactMap(NamedTuple):
    """CNML on the grid."""

    sample: Sample
    probability: Tensor  # (resolution, resolution) of class 1; rows are heights
    normaliser: Tensor  # (resolution, resolution) C(x), from 1 to 2
    limits: float  # the share of refits without a finite maximum
    unconverged: int  # refits that did not converge


class QueryFit(NamedTuple):
    """One model of the second figure: fitted to the data, or to the data and the query."""

    probability: Tensor  # (resolution, resolution) of class 1
    at_query: tuple[float, float]  # of both classes, at the query


@final
@dataclass(frozen=True, eq=False)
class Findings:
    """All that the study has found."""

    study: ToyStudy
    overlapping: ExactMap
    apart: ExactMap
    trained: QueryFit
    refits: tuple[QueryFit, QueryFit]  # with the query in class 0, and in class 1
    maps: Mapping[str, Mapping[float, Tensor]]  # method -> λ -> probability of class 1

    @property
    def cnml_at_query(self) -> tuple[float, float]:
        """What CNML makes of the two refits: the normalised probabilities at the query."""
        first, second = (refit.at_query[y] for y, refit in enumerate(self.refits))
        return first / (first + second), second / (first + second)

    def undecided(self, method: str, l2: float) -> float:
        """Return the share of a map on which neither class is preferred by much."""
        return share_undecided(self.maps[method][l2])

    def distance(self, method: str, l2: float) -> float:
        """Return a method's mean distance to CNMAP over the map, in probability."""
        difference = self.maps[method][l2] - self.maps[CNMAP][l2]
        return difference.abs().mean().item()


def share_undecided(probability: Tensor) -> float:
    """Return the share of a map within `UNDECIDED` of one half."""
    return ((probability - 0.5).abs() <= UNDECIDED).double().mean().item()


@one_thread()
def run(study: ToyStudy, progress: Progress) -> Findings:
    """Run all stages."""
    progress.stage("CNML on two samples")
    sample = draw(study, study.overlapping)
    overlapping = exact_map(study, sample, progress)
    apart = exact_map(study, draw(study, study.apart), progress)
    trained, refits = query_fits(study, sample)
    progress.stage("CNMAP, ACNML, BMA and MAP")
    by_penalty = {l2: compare(study, sample, l2, progress) for l2 in study.penalties}
    maps = {m: {l2: found[m] for l2, found in by_penalty.items()} for m in METHODS}
    return Findings(study, overlapping, apart, trained, refits, maps)


# Data ------------------------------------------------------------------------------------------


def draw(study: ToyStudy, distance: float) -> Sample:
    """Draw two round clouds of points, on a rising diagonal and so far apart."""
    generator = torch.Generator().manual_seed(study.seed)
    noise = torch.randn(study.points, 2, generator=generator, dtype=torch.float64)
    labels = torch.arange(study.points) % 2
    side = (2 * labels - 1).unsqueeze(-1) * distance / 2
    return Sample(noise + side / 2**0.5, labels)


def grid(study: ToyStudy) -> Tensor:
    """Return the maps' points (cells, 2), line by line from below."""
    axis = torch.linspace(-study.extent, study.extent, study.resolution, dtype=torch.float64)
    height, across = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([across, height], dim=-1).flatten(0, 1)


def problem(sample: Sample, l2: float) -> LogisticProblem:
    """Return a logistic regression with an intercept that is not penalised."""
    penalty = torch.tensor([l2, l2, 0.0])
    return LogisticProblem(with_intercept(sample.points), sample.labels, penalty)


# Maps ------------------------------------------------------------------------------------------


def exact_map(study: ToyStudy, sample: Sample, progress: Progress) -> ExactMap:
    """Solve CNML on the grid."""
    refits = cnml(problem(sample, 0.0), with_intercept(grid(study)))
    progress.advance(1)
    return ExactMap(
        sample,
        as_map(study, refits.log_probs),
        refits.regret.exp().view(study.resolution, -1),
        refits.limit.double().mean().item(),
        int((~refits.converged).sum()),
    )


def as_map(study: ToyStudy, log_probs: Tensor) -> Tensor:
    """Return the probability of class 1 (resolution, resolution) from log-probabilities."""
    return log_probs[:, 1].exp().view(study.resolution, -1)


def query_fits(study: ToyStudy, sample: Sample) -> tuple[QueryFit, tuple[QueryFit, QueryFit]]:
    """Fit the data, and the data with the query in either class, all without a penalty."""
    query = with_intercept(torch.tensor([study.query], dtype=torch.float64))
    refits: Refits = cnml(problem(sample, 0.0), query)
    trained = fit(problem(sample, 0.0)).weights
    both = (_query_fit(study, query, weights) for weights in refits.weights[0])
    return _query_fit(study, query, trained), (next(both), next(both))


def _query_fit(study: ToyStudy, query: Tensor, weights: Tensor) -> QueryFit:
    features = torch.cat([query, with_intercept(grid(study))])
    log_probs = torch.log_softmax(features @ weights.mT, dim=-1)
    first, second = log_probs[0].exp().tolist()
    return QueryFit(as_map(study, log_probs[1:]), (first, second))


def compare(
    study: ToyStudy, sample: Sample, l2: float, progress: Progress
) -> dict[str, Tensor]:
    """Map CNMAP and the methods that need no refit, all for one penalty."""
    posed, features = problem(sample, l2), with_intercept(grid(study))
    fitted = laplace(posed)
    predictors: dict[str, Predictor] = {
        ACNML: Acnml(fitted.classifier, fitted.posterior, EXACTLY),
        BMA: Bma(fitted.classifier, fitted.posterior, study.samples, study.seed),
        MAP: Map(fitted.classifier),
    }
    maps = {CNMAP: as_map(study, cnml(posed, features).log_probs)}
    maps |= {name: as_map(study, predict(features)) for name, predict in predictors.items()}
    progress.advance(len(maps))
    return maps
