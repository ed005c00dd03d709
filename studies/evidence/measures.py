"""Scores of a method at a shift, and bootstrap intervals of differences between methods.

The images of all shifts of a network are the same test images, so a resample draws images and takes
them at every shift. A resample is a weight per image: how often it was drawn.

Some shifts add inputs that belong to no class. Every answer to them is wrong, and they have no
likelihood: accuracy and ECE count them, NLL and Brier score are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from acnml import metrics

BINS = 20  # of the ECE, as in acnml.metrics
INTERVAL = (0.025, 0.975)


class Scored(NamedTuple):
    """A method at a shift. NaN is missing."""

    network: str
    seed: int
    subject: str  # several subjects of a network differ in their shifts
    shift: str
    group: str  # shifts of one kind and strength
    price: float  # 0 for the method's own choice
    method: str
    knob: float
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


class Detected(NamedTuple):
    """A score that tells clean inputs from shifted ones, or from those of no class.

    Shifted inputs are the positives of AUROC and AUPR. FPR95 is the share of clean inputs above the
    score that 95 % of the shifted ones reach.
    """

    network: str
    seed: int
    shift: str
    group: str
    score: str
    auroc: float
    aupr: float
    fpr95: float


class Interval(NamedTuple):
    """A mean difference with its bootstrap interval of 95 %."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(mean: float, resampled: Tensor) -> Interval:
        """Return the interval of resampled differences (R,)."""
        ends = torch.quantile(resampled, torch.tensor(INTERVAL, dtype=resampled.dtype))
        return Interval(mean, *ends.tolist())

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def is_missing(cell: object) -> bool:
    """Whether a cell of a row has no value."""
    return isinstance(cell, float) and math.isnan(cell)


def detection(inside: Tensor, outside: Tensor) -> tuple[float, float, float]:
    """Return AUROC, AUPR and FPR95 of a score."""
    pair = inside.double(), outside.double()
    return metrics.auroc(*pair), metrics.aupr(*pair), metrics.fpr95(*pair)


def scores(log_probs: Tensor, labels: Tensor, bins: int) -> Mapping[str, float]:
    """Return accuracy, NLL, Brier score and ECE."""
    if (labels >= 0).all():
        return metrics.summary(log_probs, labels, bins)
    confidence, predicted = log_probs.exp().max(1)
    pair = confidence.clamp(max=1), (predicted == labels).double()
    return {
        "accuracy": pair[1].mean().item(),
        "nll": math.nan,
        "brier": math.nan,
        "ece": metrics.ece_of_confidences(*pair, bins),
    }


def resamples(images: int, count: int, seed: int) -> Tensor:
    """Return weights (R, N): how often each image is drawn."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(images, (count, images), generator=generator)
    weights = torch.zeros(count, images, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))


def resampled(log_probs: Tensor, labels: Tensor, weights: Tensor, bins: int = BINS) -> Tensor:
    """Return ECE and NLL of all resamples (2, R); the NLL is NaN where it does not exist."""
    probs = log_probs.exp()
    ece = _resampled_ece(probs, labels, weights, bins)
    if (labels < 0).any():
        return torch.stack([ece, torch.full_like(ece, torch.nan)])
    nll = -log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    return torch.stack([ece, weights @ nll / weights.sum(1)])


def _resampled_ece(probs: Tensor, labels: Tensor, weights: Tensor, bins: int) -> Tensor:
    """Return the ECE with bins of equal mass, for weights (R, N)."""
    confidence, predicted = probs.max(1)
    order = confidence.argsort()
    gap = (confidence - (predicted == labels).to(confidence.dtype))[order]
    sorted_weights = weights[:, order]
    middle = sorted_weights.cumsum(1) - sorted_weights / 2
    total = weights.sum(1, keepdim=True)
    index = (middle / total * bins).long().clamp(max=bins - 1)
    sums = torch.zeros(len(weights), bins, dtype=gap.dtype)
    sums.scatter_add_(1, index, sorted_weights * gap)
    return sums.abs().sum(1) / total.squeeze(1)
