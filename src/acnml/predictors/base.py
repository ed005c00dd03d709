"""Predictor: the base class of all predictors, and checks that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml.classifier import Classifier, require_classifier
from acnml.fit.batches import checked_labels, require_classes
from acnml.posteriors.base import Posterior


class Predictor(ABC):
    """A function from a batch of inputs to normalised log-probabilities (B, K).

    >>> predictor: acnml.predictors.Predictor = acnml.Map(acnml.Classifier(torch.nn.Identity()))
    >>> predictor.predict(torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    tensor([0, 1])
    """

    @abstractmethod
    def __call__(self, x: Inputs) -> Tensor:
        """Return log p(y|x), detached, for a batch of any size."""

    @arrays_for_arrays
    def probs(self, x: Inputs) -> Tensor:
        """Return the probabilities p(y|x) (B, K)."""
        return self(x).exp()

    @arrays_for_arrays
    def predict(self, x: Inputs) -> Tensor:
        """Return the likeliest class of every input (B,), or -1 for one without an answer.

        An input has no answer if its probabilities are NaN (see `on_error` of `Acnml`).
        """
        log_probs = self(x)
        return log_probs.argmax(-1).where(~log_probs.isnan().any(-1), -1)

    @final
    @arrays_for_arrays
    def complexity(self, x: Inputs, labels: Any) -> Tensor:
        """Return -log p(y|x) of the given labels (B,): the nats that it takes to encode them.

        A high value points to a label that is wrong, or to an input that is hard. In the NML family
        it is the loss of the network, less what adapting the weights to the label gains, plus the
        regret.
        """
        return -of_labels(self(x), x, labels)


class NmlPredictor(Predictor):
    """p(y|x) ∝ p_θ̂_y(y|x): how well every label can be explained, normalised over the labels."""

    @abstractmethod
    def log_lik(self, x: Inputs) -> Tensor:
        """Return log p_θ̂_y(y|x) before it is normalised (B, K): how well each y is explained."""

    @final
    @arrays_for_arrays
    def __call__(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return torch.log_softmax(self.log_lik(x), dim=-1)

    @final
    @arrays_for_arrays
    def regret(self, x: Inputs) -> Tensor:
        """Return log C(x) = log Σ_y p_θ̂_y(y|x) (B,): high where many labels fit."""
        return torch.logsumexp(self.log_lik(x), dim=-1)


def of_labels(log_probs: Tensor, x: Inputs, labels: Any) -> Tensor:
    """Return the entries (B,) of the labels given for inputs, from (B, K)."""
    own = checked_labels(torch.as_tensor(labels, device=log_probs.device), x)
    require_classes(own, log_probs)
    return log_probs.gather(1, own.unsqueeze(1)).squeeze(1)


def require_predictor(value: object, kind: type[Predictor] = Predictor) -> None:
    """Raise an error if the value is not a predictor, for example an unwrapped model."""
    if not isinstance(value, kind):
        example = "Map(Classifier(model))" if kind is Predictor else "Acnml(classifier, posterior)"
        got = type(value).__name__
        raise TypeError(f"expected a predictor such as {example}, got a {got}")


def matched(posterior: Posterior, classifier: Classifier) -> Posterior:
    """Check that a posterior fits a model, and move it to the model's device.

    The posterior is converted to the model's floating point type, but at least to single precision.
    Half precision has too few digits for variances, and in float16 small variances become 0 and
    large ones infinite.
    """
    require_classifier(classifier)
    if not isinstance(posterior, Posterior):
        raise TypeError(
            f"expected a posterior, e.g. from fit_laplace, got {type(posterior).__name__}"
        )
    parameters = classifier.parameters
    checks.require_fits(posterior.mean, parameters)
    own = parameters[next(iter(posterior.mean))]
    dtype = torch.promote_types(own.dtype, torch.float32)
    mean = next(iter(posterior.mean.values()))
    if (mean.device, mean.dtype) == (own.device, dtype) and not mean.is_inference():
        return posterior  # the same object: what is known of it stays known
    return posterior.to(own.device, dtype)
