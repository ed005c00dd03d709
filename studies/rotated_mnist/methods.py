"""The methods of the rotated-MNIST study, how they look, and which are shown together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from acnml.plots import BLUE, GREEN, ORANGE, PINK
from studies.engine import method as m
from studies.engine.figures import AMBER, GREY, SKY, VIOLET
from studies.engine.method import (
    ALPHA,
    CONVERGED,
    HEAD,
    LINEARISED,
    PAPER_STEPS,
    SCALE,
    TAU,
    TEMPERATURE,
    Look,
    Method,
    Share,
)
from studies.rotated_mnist.settings import RotatedMnist

# What rules stand on, beside HEAD.
NETWORK, DROPOUT, BBP, SWAG, KFAC = "network", "dropout", "BBP", "SWAG-D", "KFAC"
ENSEMBLE, HEADS = "ensemble", "ensemble, KFAC last layers"
# How knobs are chosen.
LEAST_NLL, BUDGET = "least NLL", "budget"

MAP = Method(m.MAP, NETWORK)
MAP_BBP = Method(m.MAP, BBP)
BMA_BBP = Method(m.BMA, BBP, knob=SCALE)
ACNML_BBP = Method(m.ACNML, BBP, LINEARISED, ALPHA)
ACNML_BBP_PAPER = replace(ACNML_BBP, solver=PAPER_STEPS)
ACNML_KFAC = Method(m.ACNML, KFAC, LINEARISED, TAU, None, BUDGET)
ACNML_SWAG = Method(m.ACNML, SWAG, LINEARISED, ALPHA)
ACNML_HEAD = Method(m.ACNML, HEAD, LINEARISED, TAU, None, BUDGET)
ACNML_HEADS = Method(m.ACNML, HEADS, LINEARISED, TAU, None, BUDGET)
TEMPERED_BBP = Method(m.MAP, BBP, "", TEMPERATURE, None, BUDGET)
TEMPERED = Method(m.MAP, NETWORK, "", TEMPERATURE, None, BUDGET)
TEMPERED_LEAST_NLL = replace(TEMPERED, choice=LEAST_NLL)
TEMPERED_ENSEMBLE = Method(m.MAP, ENSEMBLE, "", TEMPERATURE, None, BUDGET)
ENSEMBLE_MAP = Method(m.MAP, ENSEMBLE)
MC_DROPOUT = Method(m.DROPOUT, DROPOUT)
GLM_HEAD = Method(m.GLM, HEAD, "", TAU, None, BUDGET)
MAP_SWAG = Method(m.MAP, SWAG)
BMA_SWAG = Method(m.BMA, SWAG, knob=SCALE)
BMA_KFAC = Method(m.BMA, KFAC, "", TAU, None, BUDGET)

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
SOLVED = (ACNML_BBP, ACNML_KFAC, ACNML_SWAG)
COSTLY = tuple(
    replace(method, solver=solver) for solver in (PAPER_STEPS, CONVERGED) for method in SOLVED
)
METHODS = CHEAP + COSTLY
# A method and the converged solution that it is compared with.
AGREEMENTS = tuple(
    (replace(method, solver=solver), replace(method, solver=CONVERGED))
    for method in SOLVED
    for solver in (LINEARISED, PAPER_STEPS)
)
FAMILIES = (
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
BLOCKS = {PAPER_STEPS: 50, CONVERGED: 10, LINEARISED: 500}


def share_of(method: Method, settings: RotatedMnist) -> Share:
    """Return how many images a method sees at every shift.

    Methods that take 30 forward passes, and that the paper does not have for MNIST, see fewer.
    """
    images = settings.images
    counts = {PAPER_STEPS: images.paper_steps, CONVERGED: images.converged}
    count = counts.get(method.solver, images.cheap)
    secondary = method.rule != m.MAP and method.posterior in (KFAC, SWAG, DROPOUT)
    count = max(1, round(images.beside * count)) if secondary else count
    return Share(count, BLOCKS.get(method.solver, 1000))


LOOKS: Mapping[Method, Look] = {
    MAP: Look("MAP", ORANGE, "o"),
    TEMPERED: Look("tempered MAP", AMBER, "v"),
    ENSEMBLE_MAP: Look("ensemble", GREY, "P"),
    TEMPERED_ENSEMBLE: Look("tempered ensemble", VIOLET, "X"),
    GLM_HEAD: Look("GLM, last layer", PINK, "s"),
    ACNML_HEAD: Look("ACNML, last layer", GREEN, "D"),
    ACNML_HEADS: Look("ensemble of ACNML", BLUE, "*"),
    ACNML_KFAC: Look("ACNML, KFAC", SKY, "^"),
    BMA_KFAC: Look("BMA, KFAC", GREY, "<"),
    MAP_BBP: Look("MAP", ORANGE, "o"),
    TEMPERED_BBP: Look("tempered MAP", AMBER, "v"),
    BMA_BBP: Look("BMA", PINK, "s"),
    ACNML_BBP: Look("ACNML, linearised", GREEN, "D"),
    ACNML_BBP_PAPER: Look("ACNML, 5 steps", BLUE, "^"),
    MAP_SWAG: Look("MAP", ORANGE, "o"),
    BMA_SWAG: Look("BMA", PINK, "s"),
    ACNML_SWAG: Look("ACNML", BLUE, "^"),
}
PAPER = (MAP_BBP, BMA_BBP, ACNML_BBP_PAPER, ACNML_BBP)
MATCHED = (
    MAP,
    TEMPERED,
    ENSEMBLE_MAP,
    TEMPERED_ENSEMBLE,
    GLM_HEAD,
    ACNML_KFAC,
    ACNML_HEAD,
    ACNML_HEADS,
)
# Families whose sweeps are drawn together: around one network, around the mean-field posterior.
AROUND_NETWORK = (
    TEMPERED,
    TEMPERED_ENSEMBLE,
    GLM_HEAD,
    BMA_KFAC,
    ACNML_KFAC,
    ACNML_HEAD,
    ACNML_HEADS,
)
AROUND_BBP = (TEMPERED_BBP, BMA_BBP, ACNML_BBP)
