"""Predictors: functions from inputs to log-probabilities."""

from acnml.predictors.acnml import Acnml
from acnml.predictors.base import Predictor
from acnml.predictors.bma import Bma
from acnml.predictors.density_tempered import DensityTempered
from acnml.predictors.ensemble import Ensemble
from acnml.predictors.glm import Glm, LogitSampling, Probit
from acnml.predictors.map import Map
from acnml.predictors.mc_dropout import McDropout
from acnml.predictors.naive_cnml import NaiveCnml, NaiveCnmlMax
from acnml.predictors.tempered import Tempered

__all__ = [
    "Acnml",
    "Bma",
    "DensityTempered",
    "Ensemble",
    "Glm",
    "LogitSampling",
    "Map",
    "McDropout",
    "NaiveCnml",
    "NaiveCnmlMax",
    "Predictor",
    "Probit",
    "Tempered",
]
