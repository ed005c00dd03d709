"""What a calibrator said about its validation data, and what was true: the basis of decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from acnml._util.arrays import as_values

By: TypeAlias = Literal["confidence", "regret"]

# More validation examples than this are not kept: their quantiles are known well enough.
MOST_KEPT = 100_000


@final
@dataclass(frozen=True, eq=False)
class Outcomes:
    """Answers for labelled data (N,), on the CPU.

    Attributes:
        label: the true class.
        predicted: the likeliest class.
        confidence: its probability.
        regret: log C(x).
        score: the atypicality m(x).

    >>> half = torch.full((4,), 0.5)
    >>> Outcomes.of(torch.tensor([0, 1, 1, 0]), torch.zeros(4).long(), half, half, half).correct
    tensor([ True, False, False,  True])
    """

    label: Tensor
    predicted: Tensor
    confidence: Tensor
    regret: Tensor
    score: Tensor

    @staticmethod
    def of(
        label: Tensor, predicted: Tensor, confidence: Tensor, regret: Tensor, score: Tensor
    ) -> Outcomes:
        """Keep all examples, or `MOST_KEPT` of them, drawn at random."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(label), generator=generator, device="cpu")
        kept = order[:MOST_KEPT].sort().values

        def some(values: Tensor) -> Tensor:
            own = values.detach().cpu()[kept]
            return own.float() if own.is_floating_point() else own.int()

        return Outcomes(*map(some, (label, predicted, confidence, regret, score)))

    @property
    def correct(self) -> Tensor:
        """Which predictions (N,) are the true class."""
        return self.label == self.predicted


def sureness_of(answers: Any, by: By) -> Tensor:
    """Return what decides (N,), higher for surer answers: the confidence, or minus the regret."""
    if by not in ("confidence", "regret"):
        raise ValueError(f'by must be "confidence" or "regret", got {by!r}')
    values = as_values(getattr(answers, by)).double()
    return values if by == "confidence" else -values
