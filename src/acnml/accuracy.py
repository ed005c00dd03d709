"""Accuracy without labels: what calibrated probabilities say about it, and how sure that is.

If probabilities are calibrated, the mean confidence of predictions is their expected accuracy. Two
things separate it from the true accuracy, and the interval holds both:

- chance: n labels drawn from the probabilities have an accuracy with a variance of Σ p (1 - p) / n²
  (the limit of a parametric bootstrap), and the error of calibration is itself measured on finitely
  many validation examples;
- the error of calibration on the validation data, at the confidences that the new data have: in
  bins of confidence, accuracy minus confidence, weighed by the shares of the new data.

What is assumed: at a given confidence, new predictions are as often right as validation
predictions. Under shift that is an approximation, because accuracy usually falls faster than
confidence. The study in docs/howto/estimate-accuracy.md shows by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, final

import torch
from torch import Tensor

from acnml.outcomes import Outcomes

# Bins of equal mass in which the calibration error is measured.
BINS = 10


@final
@dataclass(frozen=True)
class AccuracyEstimate:
    """An accuracy that was estimated without labels, and its interval.

    >>> print(AccuracyEstimate(0.9, 0.88, 0.95, 1000))
    0.900 (between 0.880 and 0.950), from 1,000 predictions without labels
    """

    accuracy: float  # the mean confidence
    low: float
    high: float
    count: int  # predictions

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.3f} (between {self.low:.3f} and {self.high:.3f}), "
            f"from {self.count:,} predictions without labels"
        )


def expected_accuracy(
    confidence: Tensor, validation: Outcomes, level: float = 0.95
) -> AccuracyEstimate:
    """Return the accuracy that predictions with these confidences probably have.

    Args:
        confidence: probabilities of the predicted classes (n,).
        validation: labelled answers of the same classifier, `Calibrator.outcomes`.
        level: of the interval, if the assumption of this module holds.

    >>> sure = torch.full((1000,), 0.9)
    >>> label = torch.zeros(1000)
    >>> right = label + (torch.arange(1000) % 10 == 0)  # 90 % are right, as they should be
    >>> validation = Outcomes(label, right, sure, sure, sure)
    >>> print(expected_accuracy(torch.full((100,), 0.9), validation))
    0.900 (between 0.838 and 0.962), from 100 predictions without labels
    """
    own = torch.as_tensor(confidence).detach().cpu().double().flatten()
    own = own[own.isfinite()]
    if not len(own):
        return AccuracyEstimate(math.nan, 0.0, 1.0, 0)
    accuracy = float(own.mean())
    error, spread = _calibration_error(own, validation)
    chance = float((own * (1 - own)).sum()) / len(own) ** 2
    width = _normal_quantile(level) * math.sqrt(chance + spread)
    low, high = accuracy + min(0.0, error) - width, accuracy + max(0.0, error) + width
    return AccuracyEstimate(accuracy, max(0.0, low), min(1.0, high), len(own))


def by_group(
    confidence: Tensor, groups: Any, validation: Outcomes, level: float = 0.95
) -> dict[Any, AccuracyEstimate]:
    """Return the expected accuracy of every group, in the order in which groups first occur.

    Args:
        confidence: probabilities of the predicted classes (n,).
        groups: a value for every prediction (n,), such as the predicted class or a country.
        validation: labelled answers of the same classifier.
        level: of every interval.

    >>> half = torch.full((100,), 0.5)
    >>> validation = Outcomes(torch.zeros(100), torch.arange(100) % 2, half, half, half)
    >>> by_group(half[:4], ["a", "b", "a", "a"], validation)["a"].count
    3
    """
    values = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(values) != len(confidence):
        raise ValueError(f"there are {len(confidence)} predictions, but {len(values)} groups")
    rows: dict[Any, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    return {
        value: expected_accuracy(confidence[own], validation, level) for value, own in rows.items()
    }


def accuracy_of(confidence: Tensor, validation: Outcomes, groups: Any, level: float) -> Any:
    """Return one estimate, or one for every group if groups are given.

    >>> half = torch.full((100,), 0.5)
    >>> validation = Outcomes(torch.zeros(100), torch.arange(100) % 2, half, half, half)
    >>> accuracy_of(half, validation, None, 0.95).count
    100
    """
    if groups is None:
        return expected_accuracy(confidence, validation, level)
    return by_group(confidence, groups, validation, level)


def _calibration_error(own: Tensor, validation: Outcomes) -> tuple[float, float]:
    """Return accuracy minus confidence on validation data, weighed like `own`, and its variance."""
    confidence, correct = validation.confidence.double(), validation.correct.double()
    inner = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device="cpu")[1:-1]
    edges = confidence.sort().values[(inner * len(confidence)).long()].unique()
    bins, own_bins = torch.bucketize(confidence, edges), torch.bucketize(own, edges)
    count = torch.bincount(bins, minlength=len(edges) + 1).double()
    shares = torch.bincount(own_bins, minlength=len(edges) + 1).double() / len(own)
    gaps = torch.zeros_like(count).index_add_(0, bins, correct - confidence) / count.clamp(min=1)
    # One more example of either kind, so that a bin without errors is not known exactly.
    right = torch.zeros_like(count).index_add_(0, bins, correct)
    rate = (right + 1) / (count + 2)
    variance = rate * (1 - rate) / count.clamp(min=1)
    return float((shares * gaps).sum()), float((shares.square() * variance).sum())


def _normal_quantile(level: float) -> float:
    """Return the half-width of a central interval of the standard normal distribution."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    return NormalDist().inv_cdf((1 + level) / 2)
