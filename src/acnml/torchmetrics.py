"""Metrics for streams and several processes, as accumulators in the style of `torchmetrics`.

Each equals the function of `acnml.metrics` with the same name on all data. `Nll` and `Brier`
keep a sum and a count. `Ece` and `Aurc` sort all predictions, so they keep the confidence and the
correctness of each one, 16 bytes. All states are in float64, which some accelerators do not have;
keep the metrics on the CPU there. It needs `pip install 'acnml[lightning]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._util import checks
from acnml._util.messages import needed_by

with needed_by("acnml.torchmetrics", "acnml[lightning]"):
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat


class _Loss(Metric):
    """What all have in common: lower is better, and states are in double precision."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_dtype(torch.float64)  # also of the empty state of a process without data


class _Mean(_Loss):
    """The mean of a score over all data."""

    count: Tensor
    _score: Callable[[Tensor, Tensor], float]  # of log-probabilities and labels

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # A MetricCollection merges metrics whose states have the same names and, after the first
        # batch, about the same values. So every score has a name of its own.
        self._total = f"{type(self).__name__.lower()}_total"
        self.add_state(self._total, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add log-probabilities (B, K) and labels (B,)."""
        total: Tensor = getattr(self, self._total)
        total += len(labels) * self._score(log_probs, labels)
        self.count += len(labels)

    def compute(self) -> Tensor:
        """Return the mean over all data so far; NaN for none."""
        return torch.div(getattr(self, self._total), self.count)


class _Confidences(_Loss):
    """A function of the confidence and the correctness of all predictions."""

    confidence: list[Tensor]
    correct: list[Tensor]
    _score: Callable[[Tensor, Tensor], float]  # of confidences and correctness

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add log-probabilities (B, K) and labels (B,)."""
        confidence, correct = metrics.confidences(log_probs, labels)
        self.confidence.append(confidence.to(self.device))
        self.correct.append(correct.to(self.device))

    def compute(self) -> Tensor:
        """Return the score of all data so far."""
        score = self._score(dim_zero_cat(self.confidence), dim_zero_cat(self.correct))
        return torch.tensor(score, dtype=torch.float64, device=self.device)


@final
class Nll(_Mean):
    """The mean negative log-likelihood, see `acnml.metrics.nll`.

    >>> metric = Nll()
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.4904
    """

    _score = staticmethod(metrics.nll)


@final
class Brier(_Mean):
    """The Brier score, see `acnml.metrics.brier`.

    >>> metric = Brier()
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.3125
    """

    _score = staticmethod(metrics.brier)


@final
class Ece(_Confidences):
    """The expected calibration error over bins of equal mass, see `acnml.metrics.ece`.

    Args:
        bins: their number.
        options: of `torchmetrics.Metric`.

    >>> metric = Ece(bins=2)
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.375
    """

    def __init__(self, bins: int = 20, **options: Any) -> None:
        super().__init__(**options)
        bins = checks.require_integer(bins, "bins", least=1)
        self._score = partial(metrics.ece_of_confidences, bins=bins)


@final
class Aurc(_Confidences):
    """The area under the risk-coverage curve, see `acnml.metrics.aurc`.

    >>> metric = Aurc()
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.25
    """

    _score = staticmethod(metrics.aurc_of_confidences)
