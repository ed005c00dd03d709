"""The methods, as functions of what is known of the data, and their knobs.

Each method has one knob. At 0 it is what it is as published; for ours that is the best temperature
T. Larger values are more cautious. The knob is the largest whose held-out NLL is within a price of
that of T, or that of least NLL (`OWN_CHOICE`). Other parameters are fitted on held-out data first.

- `EQUAL`: softmax(z / (T (1 + knob))), the temperature of equal price.
- Ours: rules on a variance v = knob · m(x)^p, as in `calibrate`: `ACNML`, `CLOSED`, `DENSITY`.
  `BOTH` spends half of the price on `DENSITY`, the rest on `ACNML`. `TEMPERED` is ACNML with
  logits z / (1 + v) and the variance v / (1 + v). `OTHER_FORMS` are the closed form on other forms
  of the score.
- `HEAD`: ACNML with a Kronecker posterior of the last layer and α(x) = knob · s(x), s with one
  mean: the default of version 0.2. For up to `FEW` classes.
- `BLOCKS`: ACNML with the exact block of the GGN of every class of the last layer, Σ = knob · H⁻¹:
  the logits are independent. For up to `FEW` classes, too.
- `GLM`: the probit approximation of a linearised Laplace predictive with covariance knob · Σ.

The published ones end with a plain temperature 1 + knob, which spends what is left of the price:

- `ETS`: ensemble temperature scaling (Zhang et al. 2020). `VECTOR`: a factor and a bias by class.
- `DAC`: density-aware calibration (Tomani et al. 2023) with ETS: T(x) = w₀ + Σ wᵢ sᵢ(x) from k-NN
  distances at several places, fitted by squared error. `NEAREST`: T (1 + knob · Σ sᵢ(x)) instead.
- `PROCAL`: the density ratio of ProCal (Xiong et al. 2023), on confidence and proximity.
- `VBLL`: a variational last layer (Harrison et al. 2024), see `variational.py`.
- `CLIPPED`: the last layer's inputs are clipped (Tao et al. 2025).
- `ENSEMBLE`: the mean of networks that are calibrated by a temperature before.
  `ENSEMBLE_ACNML`: the mean of ACNMLs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.nn import functional

from acnml import Linearised, metrics
from acnml.calibration.calibrator import MOST_SOLVED, closed_form, density_temperature
from acnml.calibration.search import largest_at_price, least_nll_temperature
from acnml.problem import Problem
from acnml.solve.isotropic import solve_isotropic
from studies.evidence.settings import PRICE
from studies.evidence.variational import Variational
from studies.evidence.views import (
    AS_THEY_ARE,
    BY_CLASS,
    DIAGONAL,
    EARLIER,
    LAST,
    OVERALL,
    UNIT,
    View,
)

PLAIN, TEMPERATURE, EQUAL = "network", "temperature", "temperature of equal price"
ACNML = {p: f"ACNML, m{mark}" for p, mark in {1: "", 2: "²", 3: "³"}.items()}
CLOSED = {p: f"closed form, m{mark}" for p, mark in {1: "", 2: "²", 3: "³"}.items()}
DENSITY = {p: f"density temperature, m{mark}" for p, mark in {1: "", 2: "²", 3: "³"}.items()}
BOTH, TEMPERED = "density temperature, then ACNML", "tempered ACNML"
HEAD, GLM = "Kronecker head (0.2)", "GLM-Laplace"
BLOCKS, VBLL = "class blocks of the GGN", "variational last layer"
ETS, VECTOR = "ensemble temperature scaling", "vector scaling"
DAC, NEAREST = "density-aware calibration", "density temperature, k-NN"
PROCAL, CLIPPED = "ProCal", "feature clipping"
ENSEMBLE, ENSEMBLE_ACNML = "ensemble", "ensemble of ACNML"
OTHER_FORMS = {
    form: f"{CLOSED[2]}, {form}" for form in (AS_THEY_ARE, OVERALL, LAST, UNIT, DIAGONAL)
}

PUBLISHED = (ETS, VECTOR, DAC, NEAREST, PROCAL, CLIPPED, GLM, VBLL)
ENSEMBLES = (ENSEMBLE, ENSEMBLE_ACNML)
AT_ALL_PRICES = (EQUAL, DENSITY[2], CLOSED[2], ACNML[2])  # and at their own choice
# At one price: other powers, forms of the score, and rules.
TRIED = (
    *(ACNML[1], ACNML[3], CLOSED[1], CLOSED[3], DENSITY[1], DENSITY[3], BOTH, TEMPERED, HEAD),
    BLOCKS,
    *OTHER_FORMS.values(),
)
WITH_REGRET = (
    *(*ACNML.values(), *CLOSED.values(), BOTH, TEMPERED, HEAD, BLOCKS, ENSEMBLE_ACNML),
    *OTHER_FORMS.values(),
)
OWN_CHOICE = 0.0  # stands for a price where the knob of least NLL is taken
NEWTON_STEPS, HALVINGS = 10, 3

# (data, knob) -> unnormalised log-likelihoods (N, K); their logsumexp is the regret.
Family: TypeAlias = Callable[[View, float], Tensor]


def variance(view: View, knob: float, power: int = 2, form: str = BY_CLASS) -> Tensor:
    """Return v = knob · m^p (N,), in the precision of the logits."""
    return (knob * view.scores[form] ** power).clamp(max=MOST_SOLVED).to(view.logits)


def ours(rule: Callable[[Tensor, Tensor], Tensor], power: int = 2, form: str = BY_CLASS) -> Family:
    """Return a rule on a form and power of the score."""
    return lambda view, knob: rule(view.logits, variance(view, knob, power, form))


def tempered_acnml(logits: Tensor, var: Tensor) -> Tensor:
    """Return ACNML of logits z / (1 + v) with the variance v / (1 + v)."""
    return solve_isotropic(logits / (1 + var).unsqueeze(-1), var / (1 + var))


def probit(view: View, knob: float) -> Tensor:
    """Return log softmax(z / √(1 + π/8 diag V))."""
    var = view.spectrum @ view.basis.square().T
    return torch.log_softmax(view.logits / (1 + math.pi / 8 * knob * var).sqrt(), -1)


def kronecker_head(view: View, knob: float) -> Tensor:
    """Return ACNML with the covariance knob · s(x) · V(x) of the logits.

    For a label y its z minimises ½ (z - z₀)ᵀV⁻¹(z - z₀) - log softmax(z)_y, which is convex:
    Newton steps, halved where they do not descend.
    """
    z0, K = view.logits.double().unsqueeze(1), view.logits.shape[1]
    basis, weight = view.basis.double(), knob * view.scores[EARLIER].unsqueeze(-1)
    inverse = (basis / (weight * view.spectrum.double()).clamp(min=1e-9).unsqueeze(1)) @ basis.T

    def objective(z: Tensor) -> Tensor:
        log_lik = torch.log_softmax(z, -1).diagonal(dim1=1, dim2=2)
        return ((z - z0) @ inverse * (z - z0)).sum(-1) / 2 - log_lik

    z, labels = z0.expand(-1, K, -1), torch.eye(K, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        p = torch.softmax(z, -1)
        gradient = (z - z0) @ inverse - (labels - p)
        hessian = inverse.unsqueeze(1) + torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        step = torch.linalg.solve(hessian, gradient.unsqueeze(-1)).squeeze(-1)
        size, before = torch.ones_like(z[..., :1]), objective(z)
        for _ in range(HALVINGS):
            size = torch.where((objective(z - size * step) > before).unsqueeze(-1), size / 2, size)
        z = z - size * step
    return torch.log_softmax(z, -1).diagonal(dim1=1, dim2=2)


def class_blocks(view: View, knob: float) -> Tensor:
    """Return ACNML with independent logits."""
    var = (knob * view.variances.double()).clamp(max=MOST_SOLVED)
    return Linearised().of(Problem.of(view.logits.double(), torch.diag_embed(var))).log_lik


def nearest(view: View, knob: float) -> Tensor:
    """Return a temperature that grows with the distances from neighbours at all places."""
    return density_temperature(view.logits, knob * view.neighbours.sum(0).to(view.logits))


FAMILIES: Mapping[str, Family] = {
    EQUAL: lambda view, knob: torch.log_softmax(view.logits / (1 + knob), -1),
    **{name: ours(solve_isotropic, power) for power, name in ACNML.items()},
    **{name: ours(closed_form, power) for power, name in CLOSED.items()},
    **{name: ours(density_temperature, power) for power, name in DENSITY.items()},
    **{name: ours(closed_form, 2, form) for form, name in OTHER_FORMS.items()},
    TEMPERED: ours(tempered_acnml),
    GLM: probit,
    HEAD: kronecker_head,
    BLOCKS: class_blocks,
    NEAREST: nearest,
}

# Published methods: held-out data -> (data -> log-probabilities).
Predict: TypeAlias = Callable[[View], Tensor]


def minimised(
    loss: Callable[[Tensor], Tensor], start: Sequence[float], least: Sequence[float | None]
) -> Tensor:
    """Return the parameters of least loss, with lower bounds, by L-BFGS-B."""

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(x, requires_grad=True)
        with torch.enable_grad():
            at = loss(point)
            (slope,) = torch.autograd.grad(at, point)
        return float(at.detach()), slope.numpy()

    bounds = [(low, None) for low in least]
    found = optimize.minimize(value, np.array(start), jac=True, method="L-BFGS-B", bounds=bounds)
    return torch.from_numpy(found.x)


def squared_error(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over inputs of the Brier score."""
    probs = log_probs.exp()
    return (probs.square().sum(-1) - 2 * probs.gather(1, labels[:, None])[:, 0]).mean()


def mixed(logits: Tensor, temperature: Tensor, weights: Tensor) -> Tensor:
    """Return log of w₁ softmax(z / t) + w₂ softmax(z) + w₃ / K for weights that are normalised."""
    w = (weights / weights.sum()).clamp(min=1e-12).log()
    parts = (torch.log_softmax(logits / temperature, -1), torch.log_softmax(logits, -1))
    even = torch.full_like(logits, -math.log(logits.shape[1]))
    return torch.logsumexp(torch.stack([*parts, even]) + w[:, None, None], dim=0)


def fit_ets(logits: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit ensemble temperature scaling: first the temperature, then the weights."""
    t = torch.tensor(least_nll_temperature(logits, labels), dtype=torch.float64)
    w = minimised(
        lambda x: squared_error(mixed(logits, t, x), labels), [1, 0.01, 0.01], [1e-3, 0, 0]
    )
    return lambda z: mixed(z, t, w)


def ensemble_temperature(held_out: View) -> Predict:
    """Fit ensemble temperature scaling."""
    predict = fit_ets(held_out.data.logits.double(), held_out.labels)
    return lambda view: predict(view.data.logits.double())


def vector_scaling(held_out: View) -> Predict:
    """Fit a factor and a bias for every class by NLL (Guo et al. 2017)."""
    z, labels = held_out.logits.double(), held_out.labels
    K = z.shape[1]
    start, least = [1.0] * K + [0.0] * K, [1e-3] * K + [None] * K
    x = minimised(lambda x: functional.cross_entropy(x[:K] * z + x[K:], labels), start, least)
    return lambda view: torch.log_softmax(x[:K] * view.logits.double() + x[K:], -1)


def density_aware(held_out: View) -> Predict:
    """Fit density-aware calibration, and ensemble temperature scaling behind it."""
    z, s, labels = held_out.data.logits.double(), held_out.neighbours, held_out.labels

    def temperature(x: Tensor, own: Tensor) -> Tensor:
        return (x[0] + x[1:] @ own).clamp(min=1e-3).unsqueeze(-1)

    x = minimised(
        lambda x: squared_error(torch.log_softmax(z / temperature(x, s), -1), labels),
        [1.0] * (1 + len(s)),
        [None, *[0.0] * len(s)],
    )
    predict = fit_ets(z / temperature(x, s), labels)
    return lambda view: predict(view.data.logits.double() / temperature(x, view.neighbours))


def procal(held_out: View) -> Predict:
    """Fit ProCal's densities of (confidence, proximity), of right and of wrong answers."""
    labels, points = held_out.labels, _confidence_and_proximity(held_out)
    right = held_out.logits.argmax(-1) == labels
    kinds = [points[right], points[~right]]
    odds = torch.tensor([len(kind) for kind in kinds], dtype=torch.float64).log()

    def predict(view: View) -> Tensor:
        own = _confidence_and_proximity(view)
        both = torch.stack([_log_density(kind, own) for kind in kinds], -1) + odds
        log_right, log_wrong = torch.log_softmax(both, -1).clamp(min=-30).unbind(-1)
        z, top = view.logits.double(), view.logits.argmax(-1, keepdim=True)
        others = torch.log_softmax(z.scatter(1, top, -torch.inf), -1) + log_wrong[:, None]
        return others.scatter(1, top, log_right[:, None]).clamp(min=-60)

    return predict


def _confidence_and_proximity(view: View) -> Tensor:
    confidence = torch.softmax(view.logits.double(), -1).amax(-1)
    return torch.stack([confidence, view.proximity], -1)


def _log_density(data: Tensor, at: Tensor) -> Tensor:
    """Return a Gaussian kernel's estimate with the normal reference as bandwidth."""
    width = 1.06 * data.std(0).clamp(min=1e-4) * len(data) ** (-1 / 6)
    far = torch.cdist(at / width, data / width).square() / 2
    return torch.logsumexp(-far, -1) - math.log(len(data)) - width.log().sum()


def clipped(held_out: View) -> Predict:
    """Fit the bound of the last layer's inputs, and a temperature, by NLL."""
    inputs = functional.pad(held_out.data.last.double(), (0, 1), value=1.0)
    weight = torch.linalg.lstsq(inputs, held_out.data.logits.double(), driver="gelsd").solution

    def logits(view: View, bound: float) -> Tensor:
        removed = view.data.last.double() - view.data.last.double().clamp(-bound, bound)
        return view.data.logits.double() - removed @ weight[:-1]

    size = held_out.data.last.abs().double()
    bounds = [float(size.quantile(q)) for q in (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)]
    tried = []
    for bound in (*bounds, math.inf):
        z = logits(held_out, bound)
        t = least_nll_temperature(z, held_out.labels)
        tried.append((metrics.nll(torch.log_softmax(z / t, -1), held_out.labels), bound, t))
    _, bound, t = min(tried)
    return lambda view: torch.log_softmax(logits(view, bound) / t, -1)


def variational(held_out: View) -> Predict:
    """Train a variational last layer."""
    predict = Variational(held_out.train, held_out.data)
    return lambda view: predict(view.data)


def ensemble(held_out: View) -> Predict:
    """Return the mean of networks at their best temperatures."""
    del held_out
    return lambda view: mean_probs([torch.log_softmax(m.logits.double(), -1) for m in view.members])


def mean_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean of probabilities."""
    return torch.logsumexp(torch.stack(list(log_probs)), 0) - math.log(len(log_probs))


def ensemble_of_acnml(view: View, knob: float) -> Tensor:
    """Return the mean of the members' probabilities, and of their regrets."""
    found = [FAMILIES[ACNML[2]](member, knob).double() for member in view.members]
    regret = torch.stack([torch.logsumexp(each, -1) for each in found]).mean(0)
    return mean_probs([torch.log_softmax(each, -1) for each in found]) + regret.unsqueeze(-1)


PREDICTORS: Mapping[str, Callable[[View], Predict]] = {
    ETS: ensemble_temperature,
    VECTOR: vector_scaling,
    DAC: density_aware,
    PROCAL: procal,
    CLIPPED: clipped,
    VBLL: variational,
    ENSEMBLE: ensemble,
}


def warmer(predict: Predict) -> Family:
    """Return a published method, ended by a plain temperature."""
    return lambda view, knob: torch.log_softmax(predict(view) / (1 + knob), -1)


def family_of(method: str, held_out: View) -> Family:
    """Return a method with one knob left."""
    if method in PREDICTORS:
        return warmer(PREDICTORS[method](held_out))
    if method == BOTH:
        return _both(held_out)
    return ensemble_of_acnml if method == ENSEMBLE_ACNML else FAMILIES[method]


def _both(held_out: View) -> Family:
    """Return a density temperature for half of the price, then ACNML."""
    slope = at_price(FAMILIES[DENSITY[2]], held_out, PRICE / 2)

    def family(view: View, knob: float) -> Tensor:
        cooler = 1 + variance(view, slope)
        return solve_isotropic(
            view.logits / cooler.unsqueeze(-1), variance(view, knob) / cooler.square()
        )

    return family


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
        return self.family(view, self.knob).double()


def cost(family: Family, held_out: View) -> Callable[[float], float]:
    """Return knob -> the NLL above that of the best temperature."""
    best = metrics.nll(torch.log_softmax(held_out.logits.double(), -1), held_out.labels)

    def at(knob: float) -> float:
        log_probs = torch.log_softmax(family(held_out, knob).double(), -1)
        return metrics.nll(log_probs, held_out.labels) - best

    return at


def at_price(family: Family, held_out: View, price: float, start: float = 0.05) -> float:
    """Return the largest knob within a price; 0 if the method costs more without it."""
    above = cost(family, held_out)
    return 0.0 if above(0.0) > price else largest_at_price(above, price, max(start, 1e-4))


def at_least_nll(family: Family, held_out: View, most: float) -> float:
    """Return the knob of least held-out NLL, below one that costs something."""
    if most <= 0:
        return 0.0
    above, high = cost(family, held_out), math.log(most)
    found = optimize.minimize_scalar(
        lambda log_knob: above(math.exp(log_knob)),
        bounds=(high - 8, high),
        method="bounded",
        options={"xatol": 0.2},
    )
    return math.exp(found.x) if found.fun < above(0.0) else 0.0


def choose(
    method: str, prices: Sequence[float], held_out: View, temperature: float
) -> list[Chosen]:
    """Choose a method's knob for every price, and for the least NLL where that is a price."""
    if method in (PLAIN, TEMPERATURE):
        factor = temperature if method == PLAIN else 1.0
        plain: Family = lambda view, _: torch.log_softmax(view.logits * factor, -1)  # noqa: E731
        return [Chosen(method, price, 0.0, plain) for price in prices]
    family, found = family_of(method, held_out), list[Chosen]()
    for price in sorted(prices, reverse=True):
        most = found[0].knob if found else 0.05
        knob = (
            at_least_nll(family, held_out, most)
            if price == OWN_CHOICE
            else at_price(family, held_out, price, most)
        )
        found.append(Chosen(method, price, knob, family))
    return found
