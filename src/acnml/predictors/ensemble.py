"""Ensemble: the average prediction of several predictors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._util.batches import Inputs, arrays_for_arrays
from acnml.predictors.base import Predictor, require_predictor


@final
@dataclass(frozen=True, eq=False)
class Ensemble(Predictor):
    """(1/n) Σ_i p_i(y|x), the average of the members' probabilities.

    A deep ensemble (Lakshminarayanan et al. 2017) is an `Ensemble` of `Map` predictors, one for
    every trained network. Members may be any predictors. Members that share one network, e.g.
    `Map(classifier.at(weights))` for several weights, can be stored together in one file.

    >>> from acnml import Classifier, Map
    >>> members = tuple(Map(Classifier(torch.nn.Linear(4, 3))) for _ in range(5))
    >>> Ensemble(members)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    predictors: tuple[Predictor, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "predictors", tuple(self.predictors))
        if not self.predictors:
            raise ValueError("an Ensemble needs at least one predictor, got none")
        for member in self.predictors:
            require_predictor(member)

    @arrays_for_arrays
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the log of the averaged probabilities, on the first member's device."""
        log_probs = [member(x) for member in self.predictors]
        classes = [tensor.shape[-1] for tensor in log_probs]
        if len(set(classes)) > 1:
            raise ValueError(
                f"the members of an Ensemble must have the same number of classes, got {classes}"
            )
        return log_mean([tensor.to(log_probs[0].device) for tensor in log_probs])


def log_mean(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the log of the average probabilities, log (1/n) Σ_i p_i, given log p_i."""
    return torch.logsumexp(torch.stack(list(log_probs)), dim=0) - math.log(len(log_probs))
