"""Map: the prediction of the network itself, usually trained to the MAP estimate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from acnml._engine.trust import checked_logits
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays, in_chunks
from acnml._util.params import Params
from acnml.classifier import Classifier, log_softmax, require_classifier
from acnml.predictors.base import Predictor


@final
@dataclass(frozen=True, eq=False)
class Map(Predictor):
    """p_θ(y|x) at the classifier's parameters θ.

    For other parameters, use e.g. `Map(classifier.at(posterior.mean))`.

    >>> acnml.Map(classifier)(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    classifier: Classifier

    def __post_init__(self) -> None:
        require_classifier(self.classifier)

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return log p_θ(y|x)."""
        chunks = in_chunks(self.classifier.prepare(x), partial(checked_logits, self.classifier))
        return log_softmax(torch.cat([*chunks]))


def finite_log_probs(classifier: Classifier, x: Inputs, tensors: Params | None = None) -> Tensor:
    """Return the classifier's log-probabilities, or raise an error if they are not finite."""
    log_probs = classifier.log_probs(x, tensors)
    return checks.require_finite(log_probs, "log-probabilities are", "check the model's logits")
