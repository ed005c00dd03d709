"""Networks of the studies, each with its normalisation and, where there are some, trained weights.

`MODELS` has them all by name: `MODELS["resnet20"].untrained(seed=0)`.
"""

from acnml.experiments.models.catalogue import MODELS
from acnml.experiments.models.description import Description
from acnml.experiments.models.weights import WeightsError, load_weights

__all__ = ["MODELS", "Description", "WeightsError", "load_weights"]
