"""The methods, as functions of what is known of the data, and their knobs.

Each method has one knob. At 0 it is the network at its best temperature T, or an average at its
own best temperature. Larger values are more cautious. The knob is chosen on held-out data: the
largest value within a price over T, or the value of least NLL.

- `EQUAL`: softmax(z / (T (1 + knob))), the temperature of equal price.
- `DENSITY`, `DENSITY_M`, `NEIGHBOURS`: the temperature T (1 + knob · s²), with the Mahalanobis
  distance s from all data, that from the nearest class m, or the distance to the k-th nearest
  neighbour.
- `ISOTROPIC`: ACNML for logits with the covariance knob · m(x)^p · I. The power 2 is the default of
  `calibrate`.
- `GLM`: the probit approximation of a linearised Laplace predictive, with covariance knob · Σ.
- `BMA`: the mean prediction of weights that are drawn from the posterior with covariance knob · Σ.
- `ACNML`: ACNML with a Kronecker posterior of the last layer and α = knob. `UNIT_PRIOR` has a prior
  precision of 1.
- `WEIGHED`: α(x) = knob · s(x). `SQUARED`: α(x) = knob · s(x)².
- `EXTENDED`: the head is extended by the features of s(x), with mean weights 0: the kernel is
  V(x) + (d²(x)/n) G⁻¹ with the squared Mahalanobis distance d² and n training data.
- `BOTH`: `DENSITY` for half of the price, then `WEIGHED` for the rest.
- `LEVERAGE`: predictive NML of a linear head under squared loss (Bibas, Feder & Hassner 2021). It
  has a closed form, p_y / (p_y + p_y^h (1 - p_y)) with h = l / (1 + l) and the leverage l. For an
  unlikely label it is p_y^(1/(1+l)): a temperature 1 + l. Here l = knob · s(x)². `CLOSED_FORM`
  has l = knob · m(x)², as `calibrate` with this rule.
- `IF_COMP`: log p_y + knob · (e_y - p)ᵀV(e_y - p), the first-order estimate for the tempered last
  layer (Ng, Grosse & Ghassemi 2024 take all weights). A large knob is not cautious.
- `PNML`: the same closed form as `LEVERAGE` with l = knob · aᵀ(XᵀX)⁻¹a, the leverage of the last
  layer's input a, as in the paper of Bibas et al.
- `DROPOUT`: the mean over dropout masks of a network that was trained with dropout, at the
  temperature T_d (1 + knob), where T_d is its best one.
- `ENSEMBLE`: the mean of several networks, at such a temperature. `ENSEMBLE_ACNML` and
  `ENSEMBLE_WEIGHED` are means of their ACNMLs with one α or one α · s(x).
- `WHOLE`: ACNML over all weights with α = knob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._algebra.kernels import Kernel
from acnml.calibration.rules import closed_form, density_temperature
from acnml.predictors.ensemble import log_mean
from acnml.problem import Problem
from acnml.solve.influence import Influence
from acnml.solve.isotropic import solve_isotropic
from acnml.solve.logits import Precision, solve
from studies.evidence.views import View
from studies.search import Search

PLAIN, TEMPERATURE, EQUAL = "network", "temperature", "temperature of equal price"
DENSITY, NEIGHBOURS = "density temperature", "density temperature, k-NN"
DENSITY_M, CLOSED_FORM = "density temperature, m²", "closed-form NML, m²"
ISOTROPIC = {power: f"ACNML, V = αm{mark}·I" for power, mark in {1: "", 2: "²", 3: "³"}.items()}
GLM, BMA, ACNML, UNIT_PRIOR = "GLM-Laplace", "BMA", "ACNML", "ACNML, prior precision 1"
WEIGHED, SQUARED, EXTENDED = "ACNML · s", "ACNML · s²", "ACNML, extended head"
BOTH, LEVERAGE = "both", "leverage NML"
IF_COMP, PNML = "IF-COMP, last layer", "pNML"
DROPOUT, ENSEMBLE = "MC dropout", "ensemble"
ENSEMBLE_ACNML, ENSEMBLE_WEIGHED = "ensemble of ACNML", "ensemble of ACNML · s"
WHOLE = "ACNML, all weights"

# Methods that need no more than one network.
POST_HOC: tuple[str, ...] = (
    *(PLAIN, TEMPERATURE, EQUAL, DENSITY, NEIGHBOURS, GLM, BMA),
    *(ACNML, UNIT_PRIOR, WEIGHED, SQUARED, EXTENDED, BOTH, LEVERAGE, IF_COMP, PNML),
    *(*ISOTROPIC.values(), CLOSED_FORM, DENSITY_M),
)
SEVERAL = (ENSEMBLE, ENSEMBLE_ACNML, ENSEMBLE_WEIGHED)
METHODS: tuple[str, ...] = (*POST_HOC, DROPOUT, *SEVERAL, WHOLE)
# Without variants of ACNML.
MAIN = tuple(m for m in METHODS if m not in (UNIT_PRIOR, SQUARED, EXTENDED, BOTH))
# Where 150 classes make methods slow, variants are left out.
MANY_CLASSES = tuple(
    method for method in POST_HOC if method not in (BMA, UNIT_PRIOR, SQUARED, EXTENDED, BOTH)
)
WITH_REGRET = (
    *(ACNML, UNIT_PRIOR, WEIGHED, SQUARED, EXTENDED, BOTH, LEVERAGE, IF_COMP, PNML),
    *(*ISOTROPIC.values(), CLOSED_FORM, ENSEMBLE_ACNML, ENSEMBLE_WEIGHED, WHOLE),
)
OWN_CHOICE = 0.0  # stands for a price where the knob of least NLL is taken

TOLERANCE = 1e-5


def usable(methods: Sequence[str], view: View) -> tuple[str, ...]:
    """Return the methods that have what they need."""
    missing = [
        *(SEVERAL if view.ensemble is None else ()),
        *((DROPOUT,) if view.dropout is None else ()),
        *((WHOLE,) if view.whole is None else ()),
    ]
    return tuple(method for method in methods if method not in missing)


# (data, knob) -> unnormalised log-likelihoods (N, K); their logsumexp is the regret.
Family: TypeAlias = Callable[[View, float], Tensor]


def solved(logits: Tensor, kernel: Kernel) -> Tensor:
    """Return ACNML's log-likelihoods (N, K)."""
    return solve(logits, kernel, Precision(TOLERANCE)).log_lik


def probit(view: View, knob: float) -> Tensor:
    """Return softmax(z / √(1 + π/8 diag V))."""
    var = knob * view.kernel.diagonal()
    return torch.log_softmax(view.logits / (1 + math.pi / 8 * var).sqrt(), -1)


def untempered(view: View, temperature: float) -> Tensor:
    """Return the network's own log-probabilities."""
    return torch.log_softmax(view.logits * temperature, -1)


def averaged(view: View, knob: float) -> Tensor:
    """Return log E softmax(z + ε) with ε ~ N(0, knob · V), from samples that are fixed."""
    generator = torch.Generator().manual_seed(0)
    kernel, shape = view.kernel, view.logits.shape
    spread = (knob * kernel.var).sqrt()

    def drawn() -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.log_softmax(view.logits + (spread * noise) @ kernel.basis.T, -1)

    return log_mean([drawn() for _ in range(view.samples)])


def warmer(log_probs: Tensor | None, knob: float) -> Tensor:
    """Return an average's log-probabilities at a higher temperature."""
    assert log_probs is not None
    return torch.log_softmax(log_probs / (1 + knob), -1)


def mean_of_members(family: Family) -> Family:
    """Return the mean of the members' probabilities, and of their regrets."""

    def of_all(view: View, knob: float) -> Tensor:
        found = [family(member, knob) for member in view.members]
        regret = torch.stack([torch.logsumexp(each, -1) for each in found]).mean(0)
        return log_mean([torch.log_softmax(each, -1) for each in found]) + regret.unsqueeze(-1)

    return of_all


def acnml(view: View, knob: float) -> Tensor:
    """Return ACNML's log-likelihoods with one α."""
    return solved(view.logits, view.kernel.scaled(knob))


def weighed(view: View, knob: float) -> Tensor:
    """Return ACNML's log-likelihoods with α · s(x)."""
    return solved(view.logits, view.kernel.scaled(knob * view.score))


def isotropic(power: int) -> Family:
    """Return ACNML with V = knob · m^power · I."""
    return lambda view, knob: solve_isotropic(view.logits, knob * view.by_class**power)


def whole(view: View, knob: float) -> Tensor:
    """Return the log-likelihoods of ACNML over all weights."""
    assert view.whole is not None
    return view.whole(knob)


FAMILIES: Mapping[str, Family] = {
    EQUAL: lambda v, knob: torch.log_softmax(v.logits / (1 + knob), -1),
    DENSITY: lambda v, knob: density_temperature(v.logits, knob * v.score**2),
    DENSITY_M: lambda v, knob: density_temperature(v.logits, knob * v.by_class**2),
    NEIGHBOURS: lambda v, knob: density_temperature(v.logits, knob * v.neighbours**2),
    GLM: probit,
    BMA: averaged,
    ACNML: acnml,
    UNIT_PRIOR: lambda v, knob: solved(v.logits, v.unit_kernel.scaled(knob)),
    WEIGHED: weighed,
    SQUARED: lambda v, knob: solved(v.logits, v.kernel.scaled(knob * v.score**2)),
    EXTENDED: lambda v, knob: solved(v.logits, v.extended.scaled(knob)),
    LEVERAGE: lambda v, knob: closed_form(v.logits, knob * v.score**2),
    CLOSED_FORM: lambda v, knob: closed_form(v.logits, knob * v.by_class**2),
    **{name: isotropic(power) for power, name in ISOTROPIC.items()},
    IF_COMP: lambda v, knob: Influence().log_lik_of(Problem(v.logits, v.kernel.scaled(knob))),
    PNML: lambda v, knob: closed_form(v.logits, knob * v.leverage),
    DROPOUT: lambda v, knob: warmer(v.dropout, knob),
    ENSEMBLE: lambda v, knob: warmer(v.ensemble, knob),
    ENSEMBLE_ACNML: mean_of_members(acnml),
    ENSEMBLE_WEIGHED: mean_of_members(weighed),
    WHOLE: whole,
}


@final
@dataclass(frozen=True, eq=False)
class Chosen:
    """A method with its knob, chosen on held-out data."""

    method: str
    price: float
    knob: float
    family: Family
    plain_at_zero: bool = True  # whether the network itself is the method with knob 0

    def log_lik(self, view: View) -> Tensor:
        """Return unnormalised log-likelihoods (N, K)."""
        if not self.knob and self.plain_at_zero:
            return torch.log_softmax(view.logits, -1)
        return self.family(view, self.knob)


def searched(family: Family, held_out: View, limit: float) -> Search:
    """Try knobs of a method in ascending order, until the held-out NLL is above the limit."""

    def nll(knob: float) -> float:
        log_lik = family(held_out, knob)
        return metrics.nll(torch.log_softmax(log_lik, -1), held_out.labels)

    return Search(nll, limit)


def choose(
    method: str, prices: Sequence[float], held_out: View, temperature: float
) -> list[Chosen]:
    """Choose a method's knob for every price, and for the least NLL (`OWN_CHOICE`)."""
    best = metrics.nll(torch.log_softmax(held_out.logits, -1), held_out.labels)
    every = (*prices, OWN_CHOICE)
    if method == PLAIN:
        return [Chosen(method, price, temperature, untempered) for price in every]
    if method == TEMPERATURE:
        return [Chosen(method, price, 0.0, FAMILIES[EQUAL]) for price in every]
    if method == BOTH:
        return [_both(price, best, held_out) for price in every]
    family = FAMILIES[method]
    search = searched(family, held_out, best + max(prices))
    knobs = {price: search.largest(best + price) for price in prices}
    is_plain = method not in (DROPOUT, ENSEMBLE)
    found = [Chosen(method, price, knob, family, is_plain) for price, knob in knobs.items()]
    return [*found, Chosen(method, OWN_CHOICE, search.least(best), family, is_plain)]


def _both(price: float, best: float, held_out: View) -> Chosen:
    """Return a density temperature for half of the price, then ACNML · s for the rest."""
    slope = 0.0
    if price != OWN_CHOICE:
        half = best + price / 2
        slope = searched(FAMILIES[DENSITY], held_out, half).largest(half)

    def family(view: View, knob: float) -> Tensor:
        factor = 1 + slope * view.score**2
        kernel = view.kernel.scaled(knob * view.score / factor**2)
        return solved(view.logits / factor.unsqueeze(-1), kernel)

    search = searched(family, held_out, best + price)
    knob = search.least(best) if price == OWN_CHOICE else search.largest(best + price)
    return Chosen(BOTH, price, knob, family)
