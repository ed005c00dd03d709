"""What a predictor is, and how a posterior is matched to the model it will be used with."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from acnml import checks
from acnml.batches import Inputs
from acnml.classifier import Classifier
from acnml.posteriors import Posterior


class Predictor(ABC):
    """A function from a batch of inputs to normalised log-probabilities (B, K)."""

    @abstractmethod
    def __call__(self, x: Inputs) -> Tensor:
        """Return log p(y|x), detached, for a batch of any size."""


def matched(posterior: Posterior, classifier: Classifier) -> Posterior:
    """Return the posterior on the model's device and dtype, or say where it does not fit."""
    if not isinstance(posterior, Posterior):
        raise TypeError(f"expected a posterior, got {type(posterior).__name__}")
    parameters = classifier.parameters
    checks.require_fits(posterior.mean, parameters)
    own = parameters[next(iter(posterior.mean))]
    return posterior.to(own.device, own.dtype)
