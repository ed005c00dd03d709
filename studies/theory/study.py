"""The theory study: errors of approximations of exact CNMAP as the data grow.

For every size n: fit, refit exactly with every query and label, estimate the same refits by the
influence function and by ACNML, and compare errors with bounds. See `studies.theory.bounds` for
what is bounded by what. What comes out, `Findings`, is plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml import Acnml, Gradient, Linearised, Map
from acnml.exact import Laplace, LogisticProblem, Refits, cnml, laplace, with_intercept
from acnml.solve import Solver
from studies.terminal import Progress, one_thread
from studies.theory.bounds import (
    Constants,
    Theorem,
    acnml_estimate,
    convex_bounds,
    convex_constants,
    influence_estimate,
    log_prob_bound,
    proposition_bound,
    theorem_bound,
    theorem_constants,
)

METHODS = MAP, INFLUENCE, ACNML = "MAP", "influence function", "ACNML"
# One full step from the mean is the influence function; the other is ACNML, solved.
SOLVERS: Mapping[str, Solver] = {
    INFLUENCE: Gradient(steps=1, step_size=1.0),
    ACNML: Linearised(tolerance=1e-12),
}


@final
@dataclass(frozen=True)
class TheoryStudy:
    """The settings of the study.

    Args:
        seed: of the data, the labels and the queries.
        sizes: numbers of training points, increasing; smaller sets are the beginning of larger.
        weights: of the model that the labels are drawn from, the intercept last.
        l2: λ, on all weights.
        queries: how many; each with both labels.
        spread: standard deviation of the queries; that of the training points is 1.
    """

    seed: int = 0
    sizes: tuple[int, ...] = (100, 215, 464, 1000, 2154, 4642, 10_000, 21_544, 46_416, 100_000)
    weights: tuple[float, ...] = (1.0, -0.7, 0.3)
    l2: float = 1.0
    queries: int = 20
    spread: float = 2.0

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes must be at least two, and increase")

    @property
    def work(self) -> int:
        """Training points that are fitted in all: a measure of the study's duration."""
        return sum(self.sizes)


class Bound(NamedTuple):
    """A bound beside the error it is for, over all queries and labels it was taken of."""

    largest: float  # the largest bound; infinite where one of them is not proven
    proven: float  # the share of bounds that are finite
    broken: int  # how many finite bounds are below their error
    tightest: float  # the smallest ratio of a finite bound to its error


class Measured(NamedTuple):
    """What was found for one size. Errors are the largest over queries and labels."""

    n: int
    theorem: Theorem  # on the ball that Giordano's theorem needs
    convex: Constants  # on the ball that convexity needs
    parameter_errors: Mapping[str, float]  # method -> ‖θ - θ̂_y‖
    log_prob_errors: Mapping[str, float]  # method -> |log p(y|x) - log p_CNMAP(y|x)|
    theorem_bound: Bound  # (2), of the influence function
    printed_bound: Bound  # the same with the condition as the paper prints it
    influence_bound: Bound  # (3), of the influence function
    acnml_bound: Bound  # (4), of ACNML
    proposition_bound: Bound  # (5) with (2), of the influence function
    log_prob_bound: Bound  # (6) with (4), of ACNML
    converged: bool  # of all exact refits

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """All of them."""
        weights = (self.theorem_bound, self.printed_bound, self.influence_bound, self.acnml_bound)
        return (*weights, self.proposition_bound, self.log_prob_bound)


@final
@dataclass(frozen=True, eq=False)
class Findings:
    """All that the study has found."""

    study: TheoryStudy
    measured: tuple[Measured, ...]

    def parameter_slope(self, method: str) -> float:
        """Return the slope of a method's parameter error against n, in logarithms."""
        return slope([(m.n, m.parameter_errors[method]) for m in self.measured])

    def log_prob_slope(self, method: str) -> float:
        """Return the slope of a method's error of log-probabilities."""
        return slope([(m.n, m.log_prob_errors[method]) for m in self.measured])

    @property
    def broken(self) -> int:
        """How many bounds were found below their error."""
        return sum(bound.broken for m in self.measured for bound in m.bounds)

    @property
    def theorem_from(self) -> int | None:
        """The smallest n from which on the theorem's condition holds for every query."""
        held = takewhile(lambda m: m.theorem_bound.proven == 1, reversed(self.measured))
        return min((m.n for m in held), default=None)


def slope(points: list[tuple[int, float]]) -> float:
    """Return the slope of the straight line that fits the logarithms best."""
    x, y = (torch.tensor(axis, dtype=torch.float64).log() for axis in zip(*points, strict=True))
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


@one_thread()
def run(study: TheoryStudy, progress: Progress) -> Findings:
    """Measure every size."""
    problem, queries = draw(study)
    measured = []
    for n in study.sizes:
        progress.stage(f"{n:,} training points")
        first = LogisticProblem(problem.features[:n], problem.labels[:n], study.l2)
        measured.append(measure(first, queries))
        progress.advance(n)
    return Findings(study, tuple(measured))


def draw(study: TheoryStudy) -> tuple[LogisticProblem, Tensor]:
    """Draw all training points, labels from the model, and the queries."""
    generator = torch.Generator().manual_seed(study.seed)
    d = len(study.weights) - 1

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, d, generator=generator, dtype=torch.float64)

    queries = with_intercept(study.spread * normal(study.queries))
    features = with_intercept(normal(study.sizes[-1]))
    ones = torch.sigmoid(features @ torch.tensor(study.weights, dtype=torch.float64))
    labels = torch.bernoulli(ones, generator=generator).long()
    return LogisticProblem(features, labels, study.l2), queries


def measure(problem: LogisticProblem, queries: Tensor) -> Measured:
    """Compare the estimates with exact refits, and the errors with their bounds."""
    fitted, refits = laplace(problem), cnml(problem, queries)
    theorem = theorem_constants(problem, fitted.fit, queries)
    convex = convex_constants(problem, fitted.fit, queries)
    papers, proven = theorem_bound(theorem), convex_bounds(convex)
    printed = theorem_bound(theorem, share=1 / len(problem.features))
    parameters = parameter_errors(problem, fitted, queries, refits)
    log_probs = log_prob_errors(fitted, queries, refits)
    return Measured(
        n=len(problem.features),
        theorem=theorem,
        convex=convex,
        parameter_errors={method: error.max().item() for method, error in parameters.items()},
        log_prob_errors={method: error.max().item() for method, error in log_probs.items()},
        theorem_bound=compare(papers, parameters[INFLUENCE]),
        printed_bound=compare(printed, parameters[INFLUENCE]),
        influence_bound=compare(proven.influence, parameters[INFLUENCE]),
        acnml_bound=compare(proven.acnml, parameters[ACNML]),
        proposition_bound=compare(proposition_bound(queries, papers), log_probs[INFLUENCE]),
        log_prob_bound=compare(log_prob_bound(convex, proven.acnml), log_probs[ACNML]),
        converged=bool(refits.converged.all()),
    )


def parameter_errors(
    problem: LogisticProblem, fitted: Laplace, queries: Tensor, refits: Refits
) -> dict[str, Tensor]:
    """Return ‖θ - θ̂_y‖ of every method (Q, 2)."""
    exact, fit = refits.weights[:, :, 1], fitted.fit
    log_lik = Acnml(fitted.classifier, fitted.posterior, SOLVERS[ACNML]).solve(queries).log_lik
    estimates = {
        MAP: fit.weights[1].expand_as(exact),
        INFLUENCE: influence_estimate(problem, fit, queries),
        ACNML: acnml_estimate(problem, fit, queries, log_lik),
    }
    return {method: (theta - exact).norm(dim=-1) for method, theta in estimates.items()}


def log_prob_errors(fitted: Laplace, queries: Tensor, refits: Refits) -> dict[str, Tensor]:
    """Return the largest |log p(y|x) - log p_CNMAP(y|x)| of every method and query (Q,)."""
    predicted = {MAP: Map(fitted.classifier)(queries)}
    for method, solver in SOLVERS.items():
        predict = Acnml(fitted.classifier, fitted.posterior, solver, on_unsolved="ignore")
        predicted[method] = predict(queries)
    return {m: (found - refits.log_probs).abs().amax(-1) for m, found in predicted.items()}


def compare(bound: Tensor, error: Tensor) -> Bound:
    """Put bounds beside their errors."""
    finite = bound.isfinite()
    ratios = (bound / error)[finite]
    return Bound(
        largest=bound.max().item(),
        proven=finite.double().mean().item(),
        broken=int((error > bound).sum()),
        tightest=ratios.min().item() if len(ratios) else math.inf,
    )
