"""How methods look in figures and what they are called there: one label, colour and marker each."""

from __future__ import annotations

from collections.abc import Mapping

from studies.rotated_mnist import methods
from studies.rotated_mnist.methods import Method
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

LOOKS: Mapping[Method, Look] = {
    methods.MAP: Look("MAP", ORANGE, "o"),
    methods.TEMPERED: Look("tempered MAP", AMBER, "v"),
    methods.ENSEMBLE_MAP: Look("ensemble", GREY, "P"),
    methods.TEMPERED_ENSEMBLE: Look("tempered ensemble", VIOLET, "X"),
    methods.GLM_HEAD: Look("GLM, last layer", PINK, "s"),
    methods.ACNML_HEAD: Look("ACNML, last layer", GREEN, "D"),
    methods.ACNML_HEADS: Look("ensemble of ACNML", BLUE, "*"),
    methods.ACNML_KFAC: Look("ACNML, KFAC", SKY, "^"),
    methods.BMA_KFAC: Look("BMA, KFAC", GREY, "<"),
    methods.MAP_BBP: Look("MAP", ORANGE, "o"),
    methods.TEMPERED_BBP: Look("tempered MAP", AMBER, "v"),
    methods.BMA_BBP: Look("BMA", PINK, "s"),
    methods.ACNML_BBP: Look("ACNML, linearised", GREEN, "D"),
    methods.ACNML_BBP_PAPER: Look("ACNML, 5 steps", BLUE, "^"),
}
PAPERS = (methods.MAP_BBP, methods.BMA_BBP, methods.ACNML_BBP_PAPER, methods.ACNML_BBP)
MATCHED = (
    methods.MAP,
    methods.TEMPERED,
    methods.ENSEMBLE_MAP,
    methods.TEMPERED_ENSEMBLE,
    methods.GLM_HEAD,
    methods.ACNML_KFAC,
    methods.ACNML_HEAD,
    methods.ACNML_HEADS,
)
# Families whose sweeps are drawn together: around one network, around the mean-field posterior.
AROUND_NETWORK = (
    methods.TEMPERED,
    methods.TEMPERED_ENSEMBLE,
    methods.GLM_HEAD,
    methods.BMA_KFAC,
    methods.ACNML_KFAC,
    methods.ACNML_HEAD,
    methods.ACNML_HEADS,
)
AROUND_BBP = (methods.TEMPERED_BBP, methods.BMA_BBP, methods.ACNML_BBP)
