"""Tempered: temperature scaling of any predictor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml.predictors.base import Predictor, require_predictor


@final
@dataclass(frozen=True, eq=False)
class Tempered(Predictor):
    """p(y|x)^(1/T), normalised: temperature scaling (Guo et al. 2017) of a predictor's output.

    For `Map` this equals `Map(classifier.tempered(T))`. For predictors that average over weights or
    adapt them, it differs from applying the temperature to the classifier.

    Args:
        predictor: the predictor to scale.
        temperature: T. Values above 1 make predictions less confident, and T → ∞ makes them
            uniform. The ranking of classes does not change.

    >>> plain = acnml.Map(acnml.Classifier(torch.nn.Identity()))
    >>> acnml.Tempered(plain, temperature=2.0).probs(torch.tensor([[4.0, 0.0]]))
    tensor([[0.8808, 0.1192]])
    """

    predictor: Predictor
    temperature: float

    def __post_init__(self) -> None:
        require_predictor(self.predictor)
        checks.require_positive(self.temperature, "temperature")

    @arrays_for_arrays
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return log_softmax(log p(·|x) / T); NaN for inputs without an answer."""
        given = self.predictor(x)
        log_probs = torch.log_softmax(given / self.temperature, dim=-1)
        # The predictor may have no answer for some inputs: NaN is not due to the temperature then.
        were_finite = given.isfinite().all(-1, keepdim=True)
        checks.require_finite(
            log_probs.where(were_finite, 0.0),
            "log-probabilities are",
            f"raise the temperature ({self.temperature})",
        )
        return log_probs
