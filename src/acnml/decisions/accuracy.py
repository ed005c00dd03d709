"""Accuracy without labels: what calibrated probabilities say about it, and how sure that is.

If probabilities are calibrated, the mean confidence of predictions is their expected accuracy. Two
things separate it from the true accuracy, and the interval holds both:

- chance: n labels drawn from the probabilities have an accuracy with a variance of Σ p (1 - p) / n²
  (the limit of a parametric bootstrap), and the error of calibration is itself measured on finitely
  many validation examples;
- the error of calibration on the validation data, at the confidences that the new data have: in
  bins of confidence, accuracy minus confidence, weighed by the shares of the new data.

What is assumed: at a given confidence, new predictions are as often right as validation
predictions. **Under shift that does not hold**: accuracy usually falls faster than confidence, and
the interval lies too high. In the study of docs/howto/estimate-accuracy.md, intervals of 95 % held
the true accuracy in about half of all shifts, and in a quarter with a plain temperature.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, final

import torch
from torch import Tensor

from acnml._util.arrays import as_values
from acnml._util.checks import require_share
from acnml.decisions.outcomes import Outcomes

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
    confidence: Tensor, validation: Outcomes, level: float = 0.95, groups: Any = None
) -> Any:
    """Return the accuracy that predictions with these confidences probably have.

    Args:
        confidence: probabilities of the predicted classes (n,); those that are NaN do not count.
        validation: labelled answers of the same classifier, `Calibrator.outcomes`.
        level: of the interval, if the assumption of this module holds. Under shift the interval
            holds the accuracy less often.
        groups: a value for every prediction (n,), such as the predicted class or a country. Then
            the result maps each value to its estimate.

    >>> sure = torch.full((1000,), 0.9)
    >>> label = torch.zeros(1000)
    >>> right = label + (torch.arange(1000) % 10 == 0)  # 90 % are right, as they should be
    >>> validation = Outcomes(label, right, sure, sure, sure)
    >>> print(expected_accuracy(torch.full((100,), 0.9), validation))
    0.900 (between 0.838 and 0.962), from 100 predictions without labels
    """
    require_share(level, "level")
    if groups is not None:
        known = groups.tolist() if hasattr(groups, "tolist") else list(groups)
        rows = defaultdict[Any, list[int]](list)
        if len(known) != len(confidence):
            raise ValueError(f"there are {len(confidence)} predictions, but {len(known)} groups")
        for row, value in enumerate(known):
            rows[value].append(row)
        return {k: expected_accuracy(confidence[own], validation, level) for k, own in rows.items()}
    own = as_values(confidence).detach().cpu().double().flatten()
    own = own[own.isfinite()]
    if not len(own):
        return AccuracyEstimate(math.nan, 0.0, 1.0, 0)
    accuracy = float(own.mean())
    error, spread = _calibration_error(own, validation)
    chance = float((own * (1 - own)).sum()) / len(own) ** 2
    width = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(chance + spread)
    low, high = accuracy + min(0.0, error) - width, accuracy + max(0.0, error) + width
    return AccuracyEstimate(accuracy, max(0.0, low), min(1.0, high), len(own))


def _calibration_error(own: Tensor, validation: Outcomes) -> tuple[float, float]:
    """Return accuracy minus confidence on validation data, weighed like `own`, and its variance."""
    confidence, correct = validation.confidence.double(), validation.correct.double()
    inner = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device="cpu")[1:-1]
    edges = confidence.sort().values[(inner * len(confidence)).long()].unique()
    bins, own_bins = torch.bucketize(confidence, edges), torch.bucketize(own, edges)
    count, said, right = (
        torch.bincount(bins, weights, minlength=len(edges) + 1)
        for weights in (torch.ones_like(confidence), confidence, correct)
    )
    gaps = (right - said) / count.clamp(min=1)
    # One more example of either kind, so that a bin without errors is not known exactly.
    rate = (right + 1) / (count + 2)
    variance = rate * (1 - rate) / count.clamp(min=1)
    shares = torch.bincount(own_bins, minlength=len(edges) + 1).double() / len(own)
    return float((shares * gaps).sum()), float((shares.square() * variance).sum())
