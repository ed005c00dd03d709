"""Tempered: any prediction, made softer or sharper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.batches import Inputs
from acnml.predictors.base import Predictor, require_predictor


@final
@dataclass(frozen=True, eq=False)
class Tempered(Predictor):
    """p(y|x)^(1/T), normalised: temperature scaling (Guo et al. 2017) after the predictor.

    For `Map` this is the same as tempering the model, `Map(classifier.tempered(T))`; for predictors
    that average or adapt the two differ.

    Args:
        predictor: what is tempered.
        temperature: T. Above 1 is less confident, T → ∞ uniform; the ranking of classes stays.
    """

    predictor: Predictor
    temperature: float

    def __post_init__(self) -> None:
        require_predictor(self.predictor)
        checks.require_positive(self.temperature, "temperature")

    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return log_softmax(log p(·|x) / T)."""
        log_probs = torch.log_softmax(self.predictor(x) / self.temperature, dim=-1)
        return checks.require_finite(
            log_probs, "log-probabilities are", f"raise the temperature ({self.temperature})"
        )
