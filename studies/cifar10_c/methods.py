"""The methods of the CIFAR-10-C study, how they look, what they cost, and what they see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from acnml.plots import BLUE, GREEN, ORANGE, PINK
from acnml.tuning import PAPERS_ALPHAS
from studies.cifar10_c.settings import CLEAN, Cifar10CStudy
from studies.engine import method as m
from studies.engine.figures import AMBER, GREY, SKY, VIOLET
from studies.engine.method import (
    ALPHA,
    HEAD,
    LINEARISED,
    PAPER_STEPS,
    SCALE,
    TAU,
    TEMPERATURE,
    Look,
    Method,
    Share,
    cautious_first,
)
from studies.settings import SettingError

# What rules stand on, beside HEAD: networks, then posteriors around SWA.
SGD, SWA, ENSEMBLE, DROPOUT = "SGD", "SWA", "SWA ensemble", "SWA dropout"
SWAG_D, SWAG, KFAC, MADDOX = "SWAG-D", "SWAG", "KFAC", "KFAC of one batch"
# How knobs are chosen; `settings.Choice` says what the rules are.
LEAST_NLL, BUDGET, NEAR, MATCHED = "least NLL", "budget", "near", "matched"
PAPERS = "paper's"

MAP_SGD, MAP_SWA = Method(m.MAP, SGD), Method(m.MAP, SWA)
TEMPERED = Method(m.MAP, SWA, "", TEMPERATURE, None, LEAST_NLL)
TEMPERED_BUDGET, TEMPERED_NEAR = (replace(TEMPERED, choice=rule) for rule in (BUDGET, NEAR))
# The temperature that costs as much held-out NLL as ACNML-SWAGD with the paper's α.
TEMPERED_MATCHED = replace(TEMPERED, choice=MATCHED)
SWA_ENSEMBLE, SWA_DROPOUT = Method(m.MAP, ENSEMBLE), Method(m.DROPOUT, DROPOUT)
GLM_HEAD = Method(m.GLM, HEAD, "", TAU, None, LEAST_NLL)
ACNML_HEAD = Method(m.ACNML, HEAD, LINEARISED, TAU, None, BUDGET)
ACNML_HEAD_TEMPERED = replace(ACNML_HEAD, choice=NEAR, likelihood=None)
# The same with the prior of training, as for the whole network, and α for a knob.
ACNML_HEAD_ALPHA, ACNML_HEAD_ALPHA_TEMPERED = (
    replace(each, knob=ALPHA) for each in (ACNML_HEAD, ACNML_HEAD_TEMPERED)
)

BMA_SWAG_D, BMA_SWAG = (Method(m.BMA, each, knob=SCALE) for each in (SWAG_D, SWAG))
BMA_KFAC = Method(m.BMA, KFAC, "", SCALE, None, LEAST_NLL)
BMA_KFAC_UNSCALED = replace(BMA_KFAC, value=1.0, choice=m.FIXED)
GLM_KFAC = replace(BMA_KFAC, rule=m.GLM)
# As in the code of Maddox et al., at scale 1 and α = 1.
BMA_MADDOX = Method(m.BMA, MADDOX, knob=SCALE)
ACNML_MADDOX = Method(m.ACNML, MADDOX, LINEARISED, ALPHA)
ACNML_SWAG_D = Method(m.ACNML, SWAG_D, LINEARISED, ALPHA, None, BUDGET)
# The scale is that with which BMA has the least NLL: BMA and ACNML then stand on one posterior.
ACNML_KFAC = replace(ACNML_SWAG_D, posterior=KFAC, scale=None)
ACNML_SWAG_D_TEMPERED = replace(ACNML_SWAG_D, choice=NEAR, likelihood=None)
ACNML_SWAG_D_PAPERS, ACNML_KFAC_PAPERS = (
    replace(each, choice=PAPERS) for each in (ACNML_SWAG_D, ACNML_KFAC)
)
ACNML_SWAG_D_STEPS, ACNML_KFAC_STEPS = (
    replace(each, solver=PAPER_STEPS) for each in (ACNML_SWAG_D_PAPERS, ACNML_KFAC_PAPERS)
)

CHEAP = (
    MAP_SGD,
    MAP_SWA,
    TEMPERED,
    TEMPERED_NEAR,
    TEMPERED_BUDGET,
    TEMPERED_MATCHED,
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
    BMA_KFAC_UNSCALED,
    BMA_MADDOX,
    ACNML_SWAG_D_PAPERS,
    ACNML_KFAC_PAPERS,
    ACNML_MADDOX,
    ACNML_SWAG_D_TEMPERED,
    ACNML_SWAG_D,
    ACNML_KFAC,
    GLM_KFAC,
)
COSTLY = (ACNML_SWAG_D_STEPS, ACNML_KFAC_STEPS)
FAMILIES = (
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
# What the paper has, and the temperature to compare it with at equal price.
PAPERS_OWN = (
    MAP_SWA,
    TEMPERED,
    TEMPERED_MATCHED,
    SWA_ENSEMBLE,
    SWA_DROPOUT,
    BMA_SWAG_D,
    BMA_SWAG,
    BMA_KFAC,
    BMA_KFAC_UNSCALED,
    BMA_MADDOX,
    ACNML_SWAG_D_PAPERS,
    ACNML_KFAC_PAPERS,
    ACNML_MADDOX,
    *COSTLY,
)
# What sees fewer images, as do methods whose α is chosen by held-out NLL.
SECONDARY = (GLM_KFAC.family,)
CHEAP_BLOCK, NETWORK_WIDE_BLOCK, STEPS_BLOCK = 500, 50, 5  # images: what a killed run may lose


def methods_of(settings: Cifar10CStudy) -> tuple[Method, ...]:
    """Return all methods of a study: an ensemble needs members, dropout a network that has it.

    SWA, with which others are compared, is always there.
    """
    there = PAPERS_OWN if settings.only_papers else (*CHEAP, *NETWORK_WIDE, *COSTLY)
    known = {each.posterior for each in there}
    if unknown := set(settings.grounds) - known:
        raise SettingError(f"grounds: there is no {', '.join(unknown)}, only {', '.join(known)}")
    grounds = {SWA, *(settings.grounds or known)}
    grounds -= {ENSEMBLE} if settings.members == 1 else set()
    grounds -= set() if settings.dropout_model else {DROPOUT}
    without = () if SWAG_D in grounds else (TEMPERED_MATCHED,)  # it has nothing to match
    return tuple(each for each in there if each.posterior in grounds and each not in without)


def tried_values(method: Method, settings: Cifar10CStudy) -> tuple[float, ...]:
    """Return the values among which a knob is chosen: for α, with the paper's values."""
    papers = PAPERS_ALPHAS if method.knob == ALPHA and method.likelihood == 1 else ()
    values = cautious_first(method.knob, settings.frontier.grids)
    return tuple(sorted({*values, *papers}, reverse=method.knob != TAU))


def is_network_wide(method: Method) -> bool:
    """Whether a prediction takes tens of forward passes or more."""
    return method.rule != m.MAP and method.posterior in (SWAG_D, SWAG, KFAC, MADDOX, DROPOUT)


def share_of(method: Method, shift: str, settings: Cifar10CStudy) -> Share:
    """Return how many images a method sees at a shift; costly methods predict in tranches."""
    images = settings.images
    if method.solver == PAPER_STEPS:
        seen = images.paper_steps if not shift or shift in settings.steps_shifts else 0
        return Share(seen, STEPS_BLOCK, in_tranches=True)
    if is_network_wide(method):
        fewer = method.choice in (BUDGET, NEAR) or method.family in SECONDARY
        count = images.beside if fewer else images.network_wide
        return Share(count, NETWORK_WIDE_BLOCK, in_tranches=True)
    return Share(images.in_distribution if shift == CLEAN else images.cheap, CHEAP_BLOCK)


# What one image costs in forward passes, in docs/performance.md: for a residual network, for VGG.
# Not measured there: the paper's ten steps with KFAC (taken as twice five), and GLM over the whole
# network (taken as half of the linearised solution, whose Jacobian it needs).
KFAC_IMAGE = 40.0  # by count: a backward pass for every label
SAMPLE, LAST_LAYER = "sample", "last layer"
RESIDUAL = {SWAG_D: 82.0, KFAC: 73.0, PAPER_STEPS: 287.0, SAMPLE: 1.1, LAST_LAYER: 1.2}
VGG = {SWAG_D: 89.0, KFAC: 74.0, PAPER_STEPS: 846.0, SAMPLE: 1.2, LAST_LAYER: 1.4}


def costs_of(settings: Cifar10CStudy) -> Mapping[str, float]:
    """Return measured forward passes for an image."""
    return VGG if settings.model.startswith("vgg") else RESIDUAL


def passes_per_image(method: Method, settings: Cifar10CStudy) -> float:
    """Return about how many forward passes a method takes for an image."""
    costs = costs_of(settings)
    if method.rule in m.SAMPLING:
        return settings.samples * costs[SAMPLE]
    if method.posterior == HEAD:
        return costs[LAST_LAYER]
    if method.rule == m.MAP:
        ensemble = settings.members or len(settings.seeds)
        return ensemble if method.posterior == ENSEMBLE else 1
    if method.rule == m.GLM:
        return costs[KFAC] / 2
    if method.solver == PAPER_STEPS:
        return (2 if method.posterior == KFAC else 1) * costs[PAPER_STEPS]
    return costs[KFAC if method.posterior == MADDOX else method.posterior]


# Looks -----------------------------------------------------------------------------------------

WINE, OLIVE, BROWN, FOREST = "#882255", "#999933", "#8c6d46", "#117733"
TEAL, INDIGO = "#44aa99", "#332288"
LOOKS: Mapping[Method, Look] = {
    MAP_SGD: Look("SGD", GREY, "x"),
    MAP_SWA: Look("SWA", ORANGE, "o"),
    TEMPERED: Look("SWA-Temp", AMBER, "v"),
    TEMPERED_NEAR: Look("SWA-Temp, more cautious", ORANGE, "1"),
    TEMPERED_BUDGET: Look("SWA-Temp at the price of SWA", AMBER, "1"),
    TEMPERED_MATCHED: Look("SWA-Temp at the price of ACNML-SWAGD", TEAL, "1"),
    SWA_ENSEMBLE: Look("SWA-Ensemble", OLIVE, "X"),
    SWA_DROPOUT: Look("SWA-Dropout", BROWN, "p"),
    GLM_HEAD: Look("GLM, last layer", BROWN, "h"),
    BMA_SWAG_D: Look("SWAG-D", PINK, "s"),
    BMA_SWAG: Look("SWAG", WINE, "P"),
    BMA_KFAC: Look("KFAC-Laplace", VIOLET, "<"),
    BMA_KFAC_UNSCALED: Look("KFAC-Laplace, scale 1", VIOLET, "4"),
    BMA_MADDOX: Look("KFAC of one batch", GREY, ">"),
    ACNML_MADDOX: Look("ACNML, KFAC of one batch", GREY, "*"),
    ACNML_SWAG_D_PAPERS: Look("ACNML-SWAGD", BLUE, "^"),
    ACNML_KFAC_PAPERS: Look("ACNML-KFAC", SKY, "*"),
    ACNML_SWAG_D: Look("ACNML-SWAGD", BLUE, "^"),
    ACNML_KFAC: Look("ACNML-KFAC", SKY, "*"),
    ACNML_HEAD: Look("ACNML, last layer", GREEN, "D"),
    ACNML_HEAD_TEMPERED: Look("ACNML, last layer, tempered", TEAL, "d"),
    ACNML_HEAD_ALPHA: Look("ACNML, head by α", FOREST, "P"),
    ACNML_HEAD_ALPHA_TEMPERED: Look("ACNML, head by α, tempered", OLIVE, "p"),
    ACNML_SWAG_D_TEMPERED: Look("ACNML-SWAGD, tempered", INDIGO, "H"),
}
# The comparisons: as in the paper; all at SWA's price; all near the price of SWA-Temp.
PAPER_GROUP = (
    MAP_SGD,
    MAP_SWA,
    TEMPERED,
    TEMPERED_MATCHED,
    SWA_ENSEMBLE,
    SWA_DROPOUT,
    BMA_SWAG_D,
    BMA_SWAG,
    BMA_KFAC,
    ACNML_SWAG_D_PAPERS,
    ACNML_KFAC_PAPERS,
    ACNML_HEAD,
)
BUDGET_GROUP = (
    MAP_SWA,
    TEMPERED_BUDGET,
    ACNML_SWAG_D,
    ACNML_KFAC,
    ACNML_HEAD,
    ACNML_HEAD_ALPHA,
)
NEAR_GROUP = (
    TEMPERED,
    TEMPERED_NEAR,
    ACNML_SWAG_D_TEMPERED,
    ACNML_HEAD_TEMPERED,
    ACNML_HEAD_ALPHA_TEMPERED,
)


def paper_group(settings: Cifar10CStudy) -> list[Method]:
    """Return what a study has of the paper's comparison, without what sees fewer images."""
    there = methods_of(settings)
    return [each for each in PAPER_GROUP if each in there and sees_enough(each, settings)]


def sees_enough(method: Method, settings: Cifar10CStudy) -> bool:
    """Whether a method sees as many images as most do."""
    return share_of(method, "", settings).inputs >= settings.images.network_wide
