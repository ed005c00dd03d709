"""The methods of the study as plain values, and what turns such a value into a predictor.

A method is a rule (MAP, BMA, ACNML …), what the rule stands on (a network, a posterior), how it is
solved, and one knob. Families are methods whose knob is swept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import acnml
from acnml import Classifier, FactorBlock, Posterior, Predictor, Solver
from studies.rotated_mnist.study import RotatedMnist
from studies.rotated_mnist.workshop import Workshop
from studies.store import Artefact
from studies.study.knobs import ALPHA, SCALE, TAU, TEMPERATURE
from studies.study.saved import load_curvature

# What rules stand on.
NETWORK, DROPOUT, BBP, SWAG, KFAC = "network", "dropout", "BBP", "SWAG-D", "KFAC"
HEAD, ENSEMBLE, HEADS = "KFAC last layer", "ensemble", "ensemble, KFAC last layers"
# How ACNML is solved.
LINEARISED, PAPER, CONVERGED = "linearised", "paper's steps", "converged"
# How the knob is set.
FIXED, LEAST_NLL, BUDGET = "fixed", "least NLL", "budget"


@final
@dataclass(frozen=True)
class Method:
    """A way to get probabilities.

    Args:
        rule: MAP, BMA, GLM, MC dropout or ACNML.
        posterior: what it stands on.
        solver: how ACNML is solved.
        knob: what can be turned.
        value: to what; None until it is chosen on validation images.
        choice: how it is chosen.
    """

    rule: str
    posterior: str
    solver: str = ""
    knob: str = ""
    value: float | None = 1.0
    choice: str = FIXED

    @property
    def name(self) -> str:
        """What people call it, whatever its value: unlike that of every other method."""
        tempered = ", tempered" if self.knob == TEMPERATURE else ""
        solver = f", {self.solver}" if self.solver in (PAPER, CONVERGED) else ""
        least = " for least NLL" if self.choice == LEAST_NLL else ""
        return f"{self.rule} {self.posterior}{solver}{tempered}{least}"

    @property
    def family(self) -> Method:
        """The method whose sweep the knob is chosen from: one sweep serves all solvers."""
        solver = LINEARISED if self.solver else ""
        return replace(self, solver=solver, value=None, choice=BUDGET)

    def at(self, value: float) -> Method:
        """Return the method with its knob set."""
        return replace(self, value=value)


MAP = Method("MAP", NETWORK)
MAP_BBP = Method("MAP", BBP)
BMA_BBP = Method("BMA", BBP, knob=SCALE)
ACNML_BBP = Method("ACNML", BBP, LINEARISED, ALPHA)
ACNML_BBP_PAPER = replace(ACNML_BBP, solver=PAPER)
ACNML_KFAC = Method("ACNML", KFAC, LINEARISED, TAU, None, BUDGET)
ACNML_SWAG = Method("ACNML", SWAG, LINEARISED, ALPHA)
ACNML_HEAD = Method("ACNML", HEAD, LINEARISED, TAU, None, BUDGET)
ACNML_HEADS = Method("ACNML", HEADS, LINEARISED, TAU, None, BUDGET)
TEMPERED_BBP = Method("MAP", BBP, "", TEMPERATURE, None, BUDGET)
TEMPERED = Method("MAP", NETWORK, "", TEMPERATURE, None, BUDGET)
TEMPERED_LEAST_NLL = replace(TEMPERED, choice=LEAST_NLL)
TEMPERED_ENSEMBLE = Method("MAP", ENSEMBLE, "", TEMPERATURE, None, BUDGET)
ENSEMBLE_MAP = Method("MAP", ENSEMBLE)
MC_DROPOUT = Method("MC dropout", DROPOUT)
GLM_HEAD = Method("GLM", HEAD, "", TAU, None, BUDGET)
MAP_SWAG = Method("MAP", SWAG)
BMA_SWAG = Method("BMA", SWAG, knob=SCALE)
BMA_KFAC = Method("BMA", KFAC, "", TAU, None, BUDGET)

CHEAP = (
    MAP,
    MAP_BBP,
    BMA_BBP,
    ACNML_BBP,
    ACNML_HEAD,
    TEMPERED_LEAST_NLL,
    TEMPERED,
    GLM_HEAD,
    ENSEMBLE_MAP,
    TEMPERED_ENSEMBLE,
    ACNML_HEADS,
    MC_DROPOUT,
    ACNML_KFAC,
    BMA_KFAC,
    MAP_SWAG,
    BMA_SWAG,
    ACNML_SWAG,
)
COSTLY = tuple(
    replace(method, solver=solver)
    for solver in (PAPER, CONVERGED)
    for method in (ACNML_BBP, ACNML_KFAC, ACNML_SWAG)
)
METHODS = CHEAP + COSTLY

SWEPT = (
    TEMPERED,
    TEMPERED_ENSEMBLE,
    ACNML_HEAD,
    ACNML_HEADS,
    GLM_HEAD,
    ACNML_KFAC,
    BMA_KFAC,
    TEMPERED_BBP,
    BMA_BBP,
    ACNML_BBP,
    ACNML_SWAG,
)


def images_of(method: Method, study: RotatedMnist) -> int:
    """Return how many images a method sees at every shift."""
    images = study.images
    count = {PAPER: images.paper_steps, CONVERGED: images.converged}.get(
        method.solver, images.cheap
    )
    return max(1, round(images.beside * count)) if _is_beside(method) else count


def _is_beside(method: Method) -> bool:
    """Whether a method takes as long as 30 forward passes, and is none of the paper's for MNIST."""
    return method.rule != "MAP" and method.posterior in (KFAC, SWAG, DROPOUT)


# From values to predictors ---------------------------------------------------------------------


class Ground(NamedTuple):
    """What a rule stands on: networks, and with each a posterior where the rule needs one."""

    classifiers: tuple[Classifier, ...]
    posteriors: tuple[Posterior, ...] = ()


def artefacts_of(method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
    """Make, or find, what a method stands on."""
    members = range(workshop.study.members)
    makers: Mapping[str, Callable[[], tuple[Artefact, ...]]] = {
        NETWORK: lambda: (workshop.network(),),
        DROPOUT: lambda: (workshop.dropout(),),
        BBP: lambda: (workshop.bayes_by_backprop(),),
        SWAG: lambda: (workshop.swag(),),
        KFAC: lambda: (workshop.network(), workshop.curvature()),
        HEAD: lambda: (workshop.network(), workshop.head_curvature()),
        ENSEMBLE: lambda: tuple(workshop.network(member) for member in members),
        HEADS: lambda: tuple(
            artefact
            for member in members
            for artefact in (workshop.network(member), workshop.head_curvature(member))
        ),
    }
    return makers[method.posterior]()


def predictor(method: Method, workshop: Workshop) -> Predictor:
    """Return the predictor that a method stands for."""
    if method.value is None:
        raise ValueError(f"choose {method.name}'s {method.knob} first")
    ground, samples, seed = _ground(method, workshop), workshop.study.samples, workshop.seed

    def one(classifier: Classifier, posterior: Posterior | None) -> Predictor:
        if method.rule == "MC dropout":
            return acnml.McDropout(classifier, samples, seed)
        if posterior is None or method.rule == "MAP":
            return acnml.Map(classifier)
        if method.rule == "BMA":
            return acnml.Bma(classifier, posterior, samples, seed)
        if method.rule == "GLM":
            return acnml.Glm(classifier, posterior)
        return acnml.Acnml(classifier, posterior, solver_of(method))

    posteriors = ground.posteriors or (None,) * len(ground.classifiers)
    each = tuple(one(*pair) for pair in zip(ground.classifiers, posteriors, strict=True))
    whole = each[0] if len(each) == 1 else acnml.Ensemble(each)
    return acnml.Tempered(whole, method.value) if method.knob == TEMPERATURE else whole


def solver_of(method: Method) -> Solver:
    """Return the solver of a method: the paper takes smaller steps for KFAC."""
    if method.solver == PAPER:
        return acnml.Gradient(10, 0.25) if method.posterior == KFAC else acnml.Gradient(5, 0.5)
    if method.solver == CONVERGED:
        return acnml.Linearised(polish=10, step_size=0.3)
    return acnml.Linearised()


def _ground(method: Method, workshop: Workshop) -> Ground:
    artefacts, value = artefacts_of(method, workshop), method.value or 1.0
    if method.posterior in (BBP, SWAG):
        posterior = artefacts[0].load_posterior()
        return Ground((workshop.at_mean(posterior),), (posterior.scaled(value),))
    if method.posterior in (KFAC, HEAD, HEADS):
        pairs = list(zip(artefacts[::2], artefacts[1::2], strict=True))
        classifiers = tuple(workshop.classifier(network) for network, _ in pairs)
        return Ground(classifiers, tuple(_laplace(method, fitted) for _, fitted in pairs))
    return Ground(tuple(workshop.classifier(network) for network in artefacts))


def _laplace(method: Method, fitted: Artefact) -> Posterior:
    """Return the KFAC posterior; the whole network's with damped factors, as in the paper."""
    curvature, tau = load_curvature(fitted), method.value or 1.0
    if method.posterior == KFAC:
        return curvature.posterior(tau, FactorBlock.damped)
    return curvature.posterior(tau)
