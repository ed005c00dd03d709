"""What a predictor is, and how a posterior is matched to the model it will be used with."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier, require_classifier
from acnml.posteriors import Posterior


class Predictor(ABC):
    """A function from a batch of inputs to normalised log-probabilities (B, K)."""

    @abstractmethod
    def __call__(self, x: Inputs) -> Tensor:
        """Return log p(y|x), detached, for a batch of any size."""


def require_predictor(value: object) -> None:
    """Refuse what is no predictor, most often a model that was not wrapped."""
    if not isinstance(value, Predictor):
        kind = type(value).__name__
        raise TypeError(f"expected a predictor such as Map(Classifier(model)), got a {kind}")


def matched(posterior: Posterior, classifier: Classifier) -> Posterior:
    """Return the posterior on the model's device, or say where it does not fit.

    It takes the model's floating point type, but stays in single precision at least: of variances
    half precision keeps too few digits, and float16 makes 0 of small ones and inf of large ones.
    """
    require_classifier(classifier)
    if not isinstance(posterior, Posterior):
        raise TypeError(f"expected a posterior, got {type(posterior).__name__}")
    parameters = classifier.parameters
    checks.require_fits(posterior.mean, parameters)
    own = parameters[next(iter(posterior.mean))]
    return posterior.to(own.device, torch.promote_types(own.dtype, torch.float32))
