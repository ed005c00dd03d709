"""Scores of a method at a shift, and bootstrap intervals of differences between methods.

The images of all shifts of a network are the same test images, so a resample draws images and takes
them at every shift. A resample is a weight per image: how often it was drawn.

Some shifts add inputs that belong to no class. Every answer to them is wrong, and they have no
likelihood: accuracy, ECE and AURC count them, NLL and Brier score are missing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acnml import metrics

BINS = 20  # of the ECE, as in acnml.metrics
COMPARED = ("ece", "nll", "brier")
INTERVAL = (0.025, 0.975)


class Scored(NamedTuple):
    """A method at a shift. NaN is missing.

    Detection tells clean inputs from shifted ones, or from those of no class where there are some.
    Higher scores mean shifted: minus the confidence, the regret, and s(x). Shifted inputs are the
    positives of AUROC and AUPR. FPR95 is the share of clean inputs above the score that 95 % of
    the shifted ones reach.
    """

    network: str
    seed: int
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
    aurc: float
    auroc_confidence: float
    fpr95_confidence: float
    auroc_regret: float
    fpr95_regret: float
    auroc_typicality: float
    fpr95_typicality: float
    aupr_confidence: float
    aupr_regret: float
    aupr_typicality: float


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


DETECTION = {"auroc": metrics.auroc, "fpr95": metrics.fpr95, "aupr": metrics.aupr}


def scores(log_probs: Tensor, labels: Tensor, bins: int) -> dict[str, float]:
    """Return accuracy, NLL, Brier score, ECE and AURC."""
    if (labels >= 0).all():
        return {
            **metrics.summary(log_probs, labels, bins),
            "aurc": metrics.aurc(log_probs, labels),
        }
    confidence, predicted = log_probs.exp().max(1)
    pair = confidence.clamp(max=1), (predicted == labels).double()
    return {
        "accuracy": pair[1].mean().item(),
        "nll": math.nan,
        "brier": math.nan,
        "ece": metrics.ece_of_confidences(*pair, bins),
        "aurc": metrics.aurc_of_confidences(*pair),
    }


def resamples(images: int, count: int, seed: int) -> Tensor:
    """Return weights (R, N): how often each image is drawn."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(images, (count, images), generator=generator)
    weights = torch.zeros(count, images, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))


def resampled(
    log_probs: Tensor, labels: Tensor, weights: Tensor, bins: int = BINS
) -> dict[str, Tensor]:
    """Return ECE, NLL and Brier score of all resamples, (R,) each, as far as they exist."""
    total, probs = weights.sum(1), log_probs.exp()
    ece = _resampled_ece(probs, labels, weights, bins)
    if (labels < 0).any():
        return {"ece": ece}
    nll = -log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    squares = (probs**2).sum(1) - 2 * (-nll).exp() + 1
    return {
        "ece": ece,
        "nll": weights @ nll / total,
        "brier": weights @ squares / total,
    }


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
