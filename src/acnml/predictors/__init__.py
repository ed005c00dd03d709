"""From inputs to log-probabilities."""

from acnml.predictors.acnml import Acnml
from acnml.predictors.base import Predictor
from acnml.predictors.bma import Bma
from acnml.predictors.map import Map

__all__ = ["Acnml", "Bma", "Map", "Predictor"]
