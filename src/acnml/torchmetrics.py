"""Metrics for streams and several processes, as accumulators in the style of `torchmetrics`.

Each equals the function of `acnml.metrics` with the same name on all data at once, but it sees the
data batch by batch: `metric.update(log_probs, labels)`, then `metric.compute()`. Several processes
are merged as for every metric of `torchmetrics`.

`Nll` and `Brier` are means, so they keep a sum and a count. `Ece` and `Aurc` are not means: bins of
equal mass are quantiles of all confidences, and a risk-coverage curve sorts them. These two keep
the confidence and the correctness of every prediction, 16 bytes each, and compute at the end. All
states are in float64, which some accelerators do not have; keep the metrics on the CPU there.

It needs `pip install 'acnml[lightning]'`, which includes `torchmetrics`.

>>> import torch
>>> from acnml.torchmetrics import Nll
>>> nll = Nll()
>>> for _ in range(3):
...     nll.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
>>> round(nll.compute().item(), 4)
0.4904
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._util import checks
from acnml._util.extras import needed_by

with needed_by("acnml.torchmetrics", "acnml[lightning]"):
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat


class _Mean(Metric):
    """The mean of a score over all data."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # A MetricCollection merges metrics whose states have the same names and, after the first
        # batch, about the same values. So every score has a name of its own.
        self._total = f"{type(self).__name__.lower()}_total"
        self.add_state(self._total, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @staticmethod
    @abstractmethod
    def _score(log_probs: Tensor, labels: Tensor) -> float:
        """Return the mean over a batch."""

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add log-probabilities (B, K) and labels (B,)."""
        total: Tensor = getattr(self, self._total)
        total += len(labels) * self._score(log_probs, labels)
        self.count += len(labels)

    def compute(self) -> Tensor:
        """Return the mean over all data so far."""
        _require_data(int(self.count))
        total: Tensor = getattr(self, self._total)
        return total / self.count


class _Confidences(Metric):
    """A function of the confidence and the correctness of all predictions."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    @abstractmethod
    def _score(self, confidence: Tensor, correct: Tensor) -> float:
        """Return the score of all data."""

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add log-probabilities (B, K) and labels (B,)."""
        confidence, correct = metrics.confidences(log_probs, labels)
        self.confidence.append(confidence.to(self.device))
        self.correct.append(correct.to(self.device))

    def compute(self) -> Tensor:
        """Return the score of all data so far."""
        _require_data(len(self.confidence))
        score = self._score(dim_zero_cat(self.confidence), dim_zero_cat(self.correct))
        return torch.tensor(score, dtype=torch.float64, device=self.device)


@final
class Nll(_Mean):
    """The mean negative log-likelihood, see `acnml.metrics.nll`.

    >>> import torch
    >>> from acnml.torchmetrics import Nll
    >>> metric = Nll()
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.4904
    """

    @staticmethod
    def _score(log_probs: Tensor, labels: Tensor) -> float:
        return metrics.nll(log_probs, labels)


@final
class Brier(_Mean):
    """The Brier score, see `acnml.metrics.brier`.

    >>> import torch
    >>> from acnml.torchmetrics import Brier
    >>> metric = Brier()
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.3125
    """

    @staticmethod
    def _score(log_probs: Tensor, labels: Tensor) -> float:
        return metrics.brier(log_probs, labels)


@final
class Ece(_Confidences):
    """The expected calibration error over bins of equal mass, see `acnml.metrics.ece`.

    Args:
        bins: their number.
        options: of `torchmetrics.Metric`.

    >>> import torch
    >>> from acnml.torchmetrics import Ece
    >>> metric = Ece(bins=2)
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.375
    """

    def __init__(self, bins: int = 20, **options: Any) -> None:
        super().__init__(**options)
        self.bins = checks.require_integer(bins, "bins", least=1)

    def _score(self, confidence: Tensor, correct: Tensor) -> float:
        return metrics.ece_of_confidences(confidence, correct, self.bins)


@final
class Aurc(_Confidences):
    """The area under the risk-coverage curve, see `acnml.metrics.aurc`.

    >>> import torch
    >>> from acnml.torchmetrics import Aurc
    >>> metric = Aurc()
    >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.25
    """

    def _score(self, confidence: Tensor, correct: Tensor) -> float:
        return metrics.aurc_of_confidences(confidence, correct)


def _require_data(count: int) -> None:
    if count == 0:
        raise ValueError("the metric has seen no data: call update(log_probs, labels) first")
