"""What methods are called and how they look in figures, and which are shown together."""

from __future__ import annotations

from collections.abc import Mapping

from studies.cifar10_c import methods
from studies.cifar10_c.methods import BUDGET, HEAD, LINEARISED, NEAR, PAPERS, Method
from studies.cifar10_c.study import Cifar10CStudy
from studies.study.figures import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VIOLET,
    Look,
)
from studies.study.knobs import TEMPERATURE

WINE, OLIVE, BROWN, FOREST = "#882255", "#999933", "#8c6d46", "#117733"

LOOKS: Mapping[Method, Look] = {
    methods.MAP_SGD: Look("SGD", GREY, "x"),
    methods.MAP_SWA: Look("SWA", ORANGE, "o"),
    methods.TEMPERED: Look("SWA-Temp", AMBER, "v"),
    methods.TEMPERED_NEAR: Look("SWA-Temp, more cautious", ORANGE, "1"),
    methods.TEMPERED_BUDGET: Look("SWA-Temp at the price of SWA", AMBER, "1"),
    methods.SWA_ENSEMBLE: Look("SWA-Ensemble", OLIVE, "X"),
    methods.SWA_DROPOUT: Look("SWA-Dropout", BROWN, "p"),
    methods.GLM_HEAD: Look("GLM, last layer", SKY, "s"),
    methods.BMA_SWAG_D: Look("SWAG-D", PINK, "s"),
    methods.BMA_SWAG: Look("SWAG", WINE, "P"),
    methods.BMA_KFAC: Look("KFAC-Laplace", VIOLET, "<"),
    methods.ACNML_SWAG_D_PAPERS: Look("ACNML-SWAGD", BLUE, "^"),
    methods.ACNML_KFAC_PAPERS: Look("ACNML-KFAC", SKY, "*"),
    methods.ACNML_SWAG_D: Look("ACNML-SWAGD", BLUE, "^"),
    methods.ACNML_KFAC: Look("ACNML-KFAC", SKY, "*"),
    methods.ACNML_HEAD: Look("ACNML, last layer", GREEN, "D"),
    methods.ACNML_HEAD_TEMPERED: Look("ACNML, last layer, tempered", GREEN, "d"),
    methods.ACNML_HEAD_ALPHA: Look("ACNML, head by α", FOREST, "P"),
    methods.ACNML_HEAD_ALPHA_TEMPERED: Look("ACNML, head by α, tempered", FOREST, "p"),
    methods.ACNML_SWAG_D_TEMPERED: Look("ACNML-SWAGD, tempered", BLUE, "2"),
}
# The comparisons: as in the paper; all at SWA's price; all near the price of SWA-Temp.
PAPER_GROUP = (
    methods.MAP_SGD,
    methods.MAP_SWA,
    methods.TEMPERED,
    methods.SWA_ENSEMBLE,
    methods.SWA_DROPOUT,
    methods.BMA_SWAG_D,
    methods.BMA_SWAG,
    methods.BMA_KFAC,
    methods.ACNML_SWAG_D_PAPERS,
    methods.ACNML_KFAC_PAPERS,
    methods.ACNML_HEAD,
)
BUDGET_GROUP = (
    methods.MAP_SWA,
    methods.TEMPERED_BUDGET,
    methods.ACNML_SWAG_D,
    methods.ACNML_KFAC,
    methods.ACNML_HEAD,
    methods.ACNML_HEAD_ALPHA,
)
NEAR_GROUP = (
    methods.TEMPERED,
    methods.TEMPERED_NEAR,
    methods.ACNML_SWAG_D_TEMPERED,
    methods.ACNML_HEAD_TEMPERED,
    methods.ACNML_HEAD_ALPHA_TEMPERED,
)
RULES = {
    BUDGET: "price of SWA",
    NEAR: "near Temp",
    PAPERS: "paper’s α",
    methods.LEAST_NLL: "least NLL",
}


def paper_group(study: Cifar10CStudy) -> list[Method]:
    """Return what a study has of the paper's comparison, without what sees fewer images."""
    return [m for m in PAPER_GROUP if m in methods.methods_of(study) and sees_enough(m, study)]


def sees_enough(method: Method, study: Cifar10CStudy) -> bool:
    """Whether a method sees as many images as most do."""
    return methods.images_of(method, "", study) >= study.images.network_wide


def label(method: Method) -> str:
    """Name a method in a table: its rule, what it stands on, how it is solved, its choice."""
    rule = f"tempered {method.rule}" if method.knob == TEMPERATURE else method.rule
    rule = f"{rule} on Temp" if method.likelihood != 1 else rule
    posterior = "last layer" if method.posterior == HEAD else method.posterior
    posterior += " by α" if method.is_head_by_alpha else ""
    solver = f", {method.solver}" if method.solver not in ("", LINEARISED) else ""
    choice = f" ({RULES[method.choice]})" if method.choice in RULES else ""
    return f"{rule}, {posterior}{solver}{choice}"


def knob_text(method: Method) -> str:
    """Say where a method's knob stands, and the scale and temperature that come with it."""
    knob = f"{method.knob}={method.value:g}" if method.knob else ""
    knob += f", scale={method.scale:g}" if method.scale != 1 else ""
    tempered = f", T={method.likelihood:g}" if method.likelihood != 1 else ""
    return f"{knob}{tempered}"
