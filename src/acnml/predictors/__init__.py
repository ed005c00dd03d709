"""Predictors: functions from inputs to log-probabilities."""

from acnml.predictors.acnml import Acnml
from acnml.predictors.base import Predictor
from acnml.predictors.bma import Bma
from acnml.predictors.ensemble import Ensemble
from acnml.predictors.glm import Glm, LogitSampling, Probit
from acnml.predictors.if_comp import IfComp, fit_if_comp
from acnml.predictors.map import Map
from acnml.predictors.mc_dropout import McDropout
from acnml.predictors.modes import Modes
from acnml.predictors.naive_cnml import NaiveCnml, NaiveCnmlMax
from acnml.predictors.pnml import Pnml, fit_pnml
from acnml.predictors.tempered import Tempered

__all__ = [
    "Acnml",
    "Bma",
    "Ensemble",
    "Glm",
    "IfComp",
    "LogitSampling",
    "Map",
    "McDropout",
    "Modes",
    "NaiveCnml",
    "NaiveCnmlMax",
    "Pnml",
    "Predictor",
    "Probit",
    "Tempered",
    "fit_if_comp",
    "fit_pnml",
]
