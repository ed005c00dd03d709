"""The methods, as functions of what was recorded of the network, and their knobs.

Each method has one knob, which is 0 for the network at its best temperature T. Larger values are
more cautious. The knob is chosen on held-out data: the largest value within a price over T, or the
value of least NLL. Everything is a function of logits, inputs of the last layer and s(x).

- `EQUAL`: softmax(z / (T (1 + knob))), the temperature of equal price.
- `DENSITY`, `NEIGHBOURS`: the temperature T (1 + knob · s²), with the Mahalanobis distance or the
  distance to the k-th nearest neighbour. At its own choice, T is tuned together with the knob.
- `GLM`: the probit approximation of a linearised Laplace predictive, with covariance knob · Σ.
- `ACNML`: last-layer ACNML with α = knob. `UNIT_PRIOR` has a prior precision of 1.
- `WEIGHED`: α(x) = knob · s(x). `SQUARED`: α(x) = knob · s(x)².
- `EXTENDED`: the head is extended by the features of s(x), with mean weights 0: the kernel is
  V(x) + (d²(x)/n) G⁻¹ with the squared Mahalanobis distance d² and n training data.
- `BOTH`: `DENSITY` for half of the price, then `WEIGHED` for the rest.
- `LEVERAGE`: predictive NML of a linear head under squared loss (Bibas, Feder & Hassner 2021). It
  has a closed form, p_y / (p_y + p_y^h (1 - p_y)) with h = l / (1 + l) and the leverage l. For an
  unlikely label it is p_y^(1/(1+l)): a temperature 1 + l. Here l = knob · s(x)².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from acnml import Classifier, KroneckerCurvature, Posterior, kronecker_curvature, metrics
from acnml._algebra.kernels import Kernel, SpectralKernel
from acnml.calibration import RELATIVE_PRIOR
from acnml.head.features import only_linear
from acnml.head.solve import Precision, solve_head
from acnml.predictors.density_tempered import density_tempered
from acnml.predictors.pnml import genie_log_probs
from acnml.tuning.density import slope_of_least_nll
from acnml.tuning.temperature import least_nll_temperature
from acnml.typicality import NearestNeighbours, Reader, Typicality
from acnml.typicality.mahalanobis import Moments
from acnml.typicality.neighbours import neighbours_of
from studies.evidence.recorded import Recorded

PLAIN, TEMPERATURE, EQUAL = "network", "temperature", "temperature of equal price"
DENSITY, NEIGHBOURS = "density temperature", "density temperature, k-NN"
GLM, ACNML, UNIT_PRIOR = "GLM-Laplace", "ACNML", "ACNML, prior precision 1"
WEIGHED, SQUARED, EXTENDED = "ACNML · s", "ACNML · s²", "ACNML, extended head"
BOTH, LEVERAGE = "both", "leverage NML"
METHODS = (
    *(PLAIN, TEMPERATURE, EQUAL, DENSITY, NEIGHBOURS, GLM),
    *(ACNML, UNIT_PRIOR, WEIGHED, SQUARED, EXTENDED, BOTH, LEVERAGE),
)
WITH_REGRET = (ACNML, UNIT_PRIOR, WEIGHED, SQUARED, EXTENDED, BOTH, LEVERAGE)
OWN_CHOICE = 0.0  # stands for a price where the knob of least NLL is taken

# Knobs are searched between exp of these; beyond them they make no difference.
LOWEST, HIGHEST, BISECTIONS, GRID = -14.0, 8.0, 24, 23
TOLERANCE = 1e-5


@final
@dataclass(frozen=True, eq=False)
class View:
    """What the methods know of a split or shift."""

    logits: Tensor  # z / T in double precision (N, K)
    kernel: Kernel  # V / T², covariance of the tempered logits
    unit_kernel: Kernel  # the same with a prior precision of 1
    extended: Kernel  # the same of a head that is extended by the features of s
    score: Tensor  # s (N,)
    neighbours: Tensor  # s by nearest neighbours (N,)
    labels: Tensor


# (data, knob) -> unnormalised log-likelihoods (N, K); their logsumexp is the regret.
Family: TypeAlias = Callable[[View, float], Tensor]


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A network's posteriors and densities."""

    layer: nn.Linear
    temperature: float
    curvature: KroneckerCurvature
    typicality: Typicality
    neighbours: NearestNeighbours
    count: int  # training data

    @staticmethod
    def of(
        network: nn.Module, layer: nn.Linear, train: Recorded, held_out: Recorded, k: int
    ) -> Fitted:
        """Fit everything on the training data; only the temperature sees labels."""
        temperature = least_nll_temperature(
            torch.log_softmax(held_out.logits.double(), -1), held_out.labels
        )
        tempered = Classifier(layer).tempered(temperature)
        curvature = kronecker_curvature(tempered, [(train.inputs, train.labels)], progress=False)
        classifier, moments = Classifier(network), Moments()
        reader = Reader.of((), train.taps[:1000])
        for batch in train.taps.split(1000):
            moments.add(reader.read(batch))
        known = reader.read(held_out.taps)
        typicality = Typicality.of_moments(classifier, reader, moments, known)
        kept = reader.read(train.taps)
        neighbours = neighbours_of(classifier, reader, moments, kept, known, k)
        return Fitted(layer, temperature, curvature, typicality, neighbours, len(train.labels))

    @cached_property
    def posteriors(self) -> tuple[Posterior, Posterior]:
        """With the default prior of `calibrate`, and with a prior precision of 1."""
        default = RELATIVE_PRIOR * self.curvature.mean_eigenvalue()
        return self.curvature.posterior(default), self.curvature.posterior(1.0)

    def view(self, data: Recorded) -> View:
        """Return what the methods need to know."""
        site = only_linear(Classifier(self.layer), ["weight", "bias"])
        assert site is not None
        inputs = nn.functional.pad(data.inputs, (0, 1), value=1.0)
        kernel, unit = (p.output_kernel(site.layer, inputs).double() for p in self.posteriors)
        read = self.typicality.reader.read(data.taps)
        score = self.typicality.score(read).double()
        square = self.temperature**-2
        assert isinstance(kernel, SpectralKernel)
        return View(
            data.logits.double() / self.temperature,
            kernel.scaled(square),
            unit.scaled(square),
            self._extended(kernel, score).scaled(square),
            score,
            self.neighbours.score(read).double(),
            data.labels,
        )

    def _extended(self, kernel: SpectralKernel, score: Tensor) -> SpectralKernel:
        """Add (d²/n) G⁻¹ to V; both are diagonal in the eigenbasis of G.

        Both factors of a `KroneckerCurvature` have √n in them. G has none here.
        """
        G = self.curvature.factors[0].gradients.double() / math.sqrt(self.count)
        values = (kernel.basis.T @ G @ kernel.basis).diagonal()
        leverage = score * self.typicality.typical / self.count
        added = leverage.unsqueeze(1) / (values + RELATIVE_PRIOR * values.mean())
        return SpectralKernel(kernel.basis, kernel.var + added)


def solved(logits: Tensor, kernel: Kernel) -> Tensor:
    """Return ACNML's log-likelihoods (N, K)."""
    return solve_head(logits, kernel, Precision(TOLERANCE)).log_lik


def probit(view: View, knob: float) -> Tensor:
    """Return softmax(z / √(1 + π/8 diag V))."""
    var = knob * view.kernel.diagonal()
    return torch.log_softmax(view.logits / (1 + math.pi / 8 * var).sqrt(), -1)


def tempered(view: View, score: Tensor, knob: float) -> Tensor:
    """Return the density temperature's log-probabilities."""
    return density_tempered(view.logits, score, 1.0, knob)


FAMILIES: Mapping[str, Family] = {
    EQUAL: lambda v, knob: torch.log_softmax(v.logits / (1 + knob), -1),
    DENSITY: lambda v, knob: tempered(v, v.score, knob),
    NEIGHBOURS: lambda v, knob: tempered(v, v.neighbours, knob),
    GLM: probit,
    ACNML: lambda v, knob: solved(v.logits, v.kernel.scaled(knob)),
    UNIT_PRIOR: lambda v, knob: solved(v.logits, v.unit_kernel.scaled(knob)),
    WEIGHED: lambda v, knob: solved(v.logits, v.kernel.scaled(knob * v.score)),
    SQUARED: lambda v, knob: solved(v.logits, v.kernel.scaled(knob * v.score**2)),
    EXTENDED: lambda v, knob: solved(v.logits, v.extended.scaled(knob)),
    LEVERAGE: lambda v, knob: genie_log_probs(v.logits, knob * v.score**2),
}


def largest(family: Family, held_out: View, limit: float) -> float:
    """Return the largest knob whose held-out NLL is at most a limit, by bisection in its log."""

    def nll(at: float) -> float:
        return metrics.nll(torch.log_softmax(family(held_out, math.exp(at)), -1), held_out.labels)

    low, high = LOWEST, HIGHEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if nll(middle) <= limit else (low, middle)
    return math.exp(low)


def least(family: Family, held_out: View) -> float:
    """Return the knob of least held-out NLL on a grid; 0 if none is better than the temperature."""

    def nll(knob: float) -> float:
        return metrics.nll(torch.log_softmax(family(held_out, knob), -1), held_out.labels)

    plain = metrics.nll(torch.log_softmax(held_out.logits, -1), held_out.labels)
    step = (HIGHEST - 2 - LOWEST) / (GRID - 1)
    knob = min((math.exp(LOWEST + step * i) for i in range(GRID)), key=nll)
    return knob if nll(knob) < plain else 0.0


@final
@dataclass(frozen=True, eq=False)
class Chosen:
    """A method with its knob, chosen on held-out data."""

    method: str
    price: float
    knob: float
    family: Family

    def log_lik(self, view: View) -> Tensor:
        """Return unnormalised log-likelihoods (N, K)."""
        return self.family(view, self.knob) if self.knob else torch.log_softmax(view.logits, -1)


def choose(method: str, price: float, held_out: View, temperature: float) -> Chosen:
    """Choose a method's knob for a price, or for the least NLL (`OWN_CHOICE`)."""
    if method == PLAIN:
        return Chosen(method, price, temperature, lambda v, t: torch.log_softmax(v.logits * t, -1))
    if method == TEMPERATURE:
        return Chosen(method, price, 0.0, FAMILIES[EQUAL])
    if price == OWN_CHOICE and method in (DENSITY, NEIGHBOURS):
        return _tuned_together(method, held_out)
    best = metrics.nll(torch.log_softmax(held_out.logits, -1), held_out.labels)
    if method == BOTH:
        half = 0.0
        if price != OWN_CHOICE:
            half = largest(FAMILIES[DENSITY], held_out, best + price / 2)
        family = _both(half)
    else:
        family = FAMILIES[method]
    if price == OWN_CHOICE:
        return Chosen(method, price, least(family, held_out), family)
    return Chosen(method, price, largest(family, held_out, best + price), family)


def _both(slope: float) -> Family:
    """Return ACNML · s on a network with a density temperature."""

    def family(view: View, knob: float) -> Tensor:
        factor = 1 + slope * view.score**2
        kernel = view.kernel.scaled(knob * view.score / factor**2)
        return solved(view.logits / factor.unsqueeze(-1), kernel)

    return family


def _tuned_together(method: str, held_out: View) -> Chosen:
    """Return the density temperature with T and c of least NLL."""

    def score(view: View) -> Tensor:
        return view.score if method == DENSITY else view.neighbours

    temperature, slope = slope_of_least_nll(held_out.logits, score(held_out), held_out.labels)

    def family(view: View, knob: float) -> Tensor:
        return density_tempered(view.logits, score(view), temperature, slope)

    return Chosen(method, OWN_CHOICE, slope or 1.0, family)
