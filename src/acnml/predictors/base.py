"""Predictor: the base class of all predictors, and checks that they share."""

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
    """Raise an error if the value is not a predictor, for example an unwrapped model."""
    if not isinstance(value, Predictor):
        kind = type(value).__name__
        raise TypeError(f"expected a predictor such as Map(Classifier(model)), got a {kind}")


def matched(posterior: Posterior, classifier: Classifier) -> Posterior:
    """Check that a posterior fits a model, and move it to the model's device.

    The posterior is converted to the model's floating point type, but at least to single precision.
    Half precision has too few digits for variances, and in float16 small variances become 0 and
    large ones infinite.
    """
    require_classifier(classifier)
    if not isinstance(posterior, Posterior):
        raise TypeError(
            f"expected a posterior, e.g. from fit_kfac_laplace, got {type(posterior).__name__}"
        )
    parameters = classifier.parameters
    checks.require_fits(posterior.mean, parameters)
    own = parameters[next(iter(posterior.mean))]
    return posterior.to(own.device, torch.promote_types(own.dtype, torch.float32))
