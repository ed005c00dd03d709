"""The methods of the study as plain values; `predictors.py` turns such a value into a predictor.

A method is a rule (MAP, BMA, ACNML …), what the rule stands on (a network, a posterior), how it is
solved, one knob, how that is chosen, and a temperature of the likelihood. Families are methods
whose knob is swept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from acnml.tuning import PAPERS_ALPHAS
from studies.cifar10_c.study import CLEAN, Cifar10CStudy
from studies.study.knobs import ALPHA, SCALE, TAU, TEMPERATURE, sweep_values
from studies.study.tranches import tranches

# What rules stand on: networks, then posteriors around SWA.
SGD, SWA, ENSEMBLE, DROPOUT = "SGD", "SWA", "SWA ensemble", "SWA dropout"
SWAG_D, SWAG, KFAC, HEAD = "SWAG-D", "SWAG", "KFAC", "KFAC last layer"
# How ACNML is solved.
LINEARISED, STEPS = "linearised", "paper's steps"
# How the knob is set; `study.Choice` says what the rules are.
FIXED, LEAST_NLL, BUDGET, NEAR, PAPERS = "fixed", "least NLL", "budget", "near", "paper's"


@final
@dataclass(frozen=True)
class Method:
    """A way to get probabilities.

    Args:
        rule: MAP, BMA, GLM, MC dropout or ACNML.
        posterior: what it stands on.
        solver: how ACNML is solved.
        knob: what can be turned.
        value: to what; None until it is chosen on held-out images.
        choice: how it is chosen.
        likelihood: the temperature by which the network's logits are divided before anything else;
            None until it is found, as that of SWA's least NLL on held-out images.
        scale: of the posterior's covariance, before α; None until it is found, as that with which
            BMA has the least NLL on held-out images: BMA and ACNML then stand on one posterior.
    """

    rule: str
    posterior: str
    solver: str = ""
    knob: str = ""
    value: float | None = 1.0
    choice: str = FIXED
    likelihood: float | None = 1.0
    scale: float | None = 1.0

    @property
    def name(self) -> str:
        """What people call it, whatever its values: unlike that of every other method."""
        parts = [f"{self.rule} {self.posterior}"]
        if self.knob == TEMPERATURE:
            parts.append("tempered")
        if self.likelihood != 1:
            parts.append("tempered likelihood")
        if self.is_head_by_alpha:
            parts.append("by alpha")
        if self.solver == STEPS:
            parts.append(STEPS)
        if self.choice != FIXED:
            parts.append(self.choice)
        return ", ".join(parts)

    @property
    def family(self) -> Method:
        """The method whose sweep the knob is chosen from: one sweep serves all rules of choice."""
        return replace(self, solver=LINEARISED if self.solver else "", value=None, choice="sweep")

    @property
    def is_network_wide(self) -> bool:
        """Whether a prediction takes tens of forward passes or more."""
        return self.rule != "MAP" and self.posterior in (SWAG_D, SWAG, KFAC, DROPOUT)

    @property
    def is_head_by_alpha(self) -> bool:
        """Whether the last layer's posterior has the prior of training, and α for a knob."""
        return (self.posterior, self.knob) == (HEAD, ALPHA)

    def at(self, value: float) -> Method:
        """Return the method with its knob set."""
        return replace(self, value=value)


MAP_SGD, MAP_SWA = Method("MAP", SGD), Method("MAP", SWA)
TEMPERED = Method("MAP", SWA, "", TEMPERATURE, None, LEAST_NLL)
TEMPERED_BUDGET, TEMPERED_NEAR = (replace(TEMPERED, choice=rule) for rule in (BUDGET, NEAR))
SWA_ENSEMBLE, SWA_DROPOUT = Method("MAP", ENSEMBLE), Method("MC dropout", DROPOUT)
GLM_HEAD = Method("GLM", HEAD, "", TAU, None, LEAST_NLL)
ACNML_HEAD = Method("ACNML", HEAD, LINEARISED, TAU, None, BUDGET)
ACNML_HEAD_TEMPERED = replace(ACNML_HEAD, choice=NEAR, likelihood=None)
# The same with the prior of training, as for the whole network, and α for a knob.
ACNML_HEAD_ALPHA, ACNML_HEAD_ALPHA_TEMPERED = (
    replace(each, knob=ALPHA) for each in (ACNML_HEAD, ACNML_HEAD_TEMPERED)
)

BMA_SWAG_D, BMA_SWAG = (Method("BMA", each, knob=SCALE) for each in (SWAG_D, SWAG))
BMA_KFAC = Method("BMA", KFAC, "", SCALE, None, LEAST_NLL)
GLM_KFAC = replace(BMA_KFAC, rule="GLM")
ACNML_SWAG_D = Method("ACNML", SWAG_D, LINEARISED, ALPHA, None, BUDGET)
ACNML_KFAC = replace(ACNML_SWAG_D, posterior=KFAC, scale=None)
ACNML_SWAG_D_TEMPERED = replace(ACNML_SWAG_D, choice=NEAR, likelihood=None)
ACNML_SWAG_D_PAPERS, ACNML_KFAC_PAPERS = (
    replace(each, choice=PAPERS) for each in (ACNML_SWAG_D, ACNML_KFAC)
)
ACNML_SWAG_D_STEPS, ACNML_KFAC_STEPS = (
    replace(each, solver=STEPS) for each in (ACNML_SWAG_D_PAPERS, ACNML_KFAC_PAPERS)
)

CHEAP = (
    MAP_SGD,
    MAP_SWA,
    TEMPERED,
    TEMPERED_NEAR,
    TEMPERED_BUDGET,
    SWA_ENSEMBLE,
    GLM_HEAD,
    ACNML_HEAD,
    ACNML_HEAD_TEMPERED,
    ACNML_HEAD_ALPHA,
    ACNML_HEAD_ALPHA_TEMPERED,
)
NETWORK_WIDE = (
    SWA_DROPOUT,
    BMA_SWAG_D,
    BMA_SWAG,
    BMA_KFAC,
    ACNML_SWAG_D_PAPERS,
    ACNML_KFAC_PAPERS,
    ACNML_SWAG_D_TEMPERED,
    ACNML_SWAG_D,
    ACNML_KFAC,
    GLM_KFAC,
)
COSTLY = (ACNML_SWAG_D_STEPS, ACNML_KFAC_STEPS)
SWEPT = (
    TEMPERED,
    ACNML_HEAD,
    ACNML_HEAD_TEMPERED,
    ACNML_HEAD_ALPHA,
    ACNML_HEAD_ALPHA_TEMPERED,
    GLM_HEAD,
    BMA_SWAG_D,
    BMA_KFAC,
    ACNML_SWAG_D,
    ACNML_SWAG_D_TEMPERED,
    ACNML_KFAC,
)
# Families whose knob is chosen, though they are not part of the frontier.
TRIED = (*SWEPT, GLM_KFAC)


# What sees fewer images, as do methods whose α is chosen by held-out NLL.
BESIDE = (GLM_KFAC.family, BMA_SWAG.family)


def methods_of(study: Cifar10CStudy) -> tuple[Method, ...]:
    """Return all methods of a study: an ensemble needs members, dropout a network that has it."""
    left_out = [] if study.members > 1 else [SWA_ENSEMBLE]
    left_out += [] if study.dropout_model else [SWA_DROPOUT]
    return tuple(each for each in (*CHEAP, *NETWORK_WIDE, *COSTLY) if each not in left_out)


def choice_values(method: Method, study: Cifar10CStudy) -> tuple[float, ...]:
    """Return the values among which a knob is chosen: with the paper's, where it is its α."""
    papers = PAPERS_ALPHAS if method.knob == ALPHA and method.likelihood == 1 else ()
    values = sweep_values(method.knob, study.frontier)
    return tuple(sorted({*values, *papers}, reverse=values[0] > values[-1]))


def images_of(method: Method, shift: str, study: Cifar10CStudy) -> int:
    """Return how many images a method sees at a shift."""
    images = study.images
    if method.solver == STEPS:
        return images.paper_steps
    if method.is_network_wide:
        beside = method.choice in (BUDGET, NEAR) or method.family in BESIDE
        return images.beside if beside else images.network_wide
    return images.in_distribution if shift == CLEAN else images.cheap


def cuts(method: Method, images: int) -> list[slice]:
    """Return the rows of every stage that predictions for so many images are made in."""
    return tranches(images) if method.is_network_wide else [slice(0, images)]
