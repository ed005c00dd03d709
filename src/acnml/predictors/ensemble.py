"""Ensemble: the average prediction of several predictors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast, final

import torch
from torch import Tensor

from acnml._util.batches import Inputs, arrays_for_arrays
from acnml.predictors.base import Predictor, require_predictor

P = TypeVar("P", bound=Predictor)


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
        object.__setattr__(self, "predictors", members_of(self, self.predictors, Predictor))

    @arrays_for_arrays
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the log of the averaged probabilities, on the first member's device."""
        return log_mean(stacked([member(x) for member in self.predictors]))


def members_of(owner: Predictor, members: Iterable[object], kind: type[P]) -> tuple[P, ...]:
    """Return the members of a predictor, of which there must be at least one."""
    found = tuple(members)
    if not found:
        raise ValueError(f"{type(owner).__name__} needs at least one predictor, got none")
    for member in found:
        require_predictor(member, kind)
    return cast(tuple[P, ...], found)


def stacked(answers: Sequence[Tensor]) -> Tensor:
    """Return the answers (B, K) of members as one tensor (n, B, K), on the first one's device."""
    classes = [tensor.shape[-1] for tensor in answers]
    if len(set(classes)) > 1:
        raise ValueError(f"members must have the same number of classes, got {classes}")
    return torch.stack([tensor.to(answers[0].device) for tensor in answers])


def log_mean(log_probs: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the log of the average probabilities, log (1/n) Σ_i p_i, given log p_i."""
    return torch.logsumexp(torch.stack([*log_probs]), dim=0) - math.log(len(log_probs))
