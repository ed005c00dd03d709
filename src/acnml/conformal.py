"""Split-conformal prediction sets from the probabilities of any predictor.

A conformal set C(x) holds every label y whose score s(x, y) is at most a threshold q. The threshold
comes from n calibration data that no part of the predictor was fitted or chosen on: it is the
⌈(n + 1)·c⌉-th smallest of their scores s(xᵢ, yᵢ), where c is the coverage, and ∞ if there are too
few data for that. If the calibration data and a new point are exchangeable (for example, drawn
independently from one distribution), then

    c  ≤  P(y ∈ C(x))  ≤  c + 1/(n + 1),

where the upper bound needs scores without ties. The probability is over the calibration data *and*
the new point. For one set of calibration data, the coverage varies around c by about √(c(1−c)/n).
There is no guarantee under shift: there, the probabilities decide how much coverage is lost.

`fit_by_class` has a threshold for every class, from the data of that class. For every class k,
P(y ∈ C(x) | y = k) is then at least c. This needs about 1/(1 − c) data of every class at least: a
class with fewer is in every set.

`fit_weighted` is for inputs that have shifted (Tibshirani et al. 2019). Calibration data count as
often as inputs with their score m(x) of atypicality occur among new, unlabelled inputs. The
coverage is c if labels depend on inputs as before and the weights are the likelihood ratio of the
inputs. Here the ratio is estimated in bins of the score: it corrects what a shift changes about the
score, and nothing else.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from acnml._util.checks import require_share
from acnml.metrics import _as_tensor, _checked, _checked_labels, _checked_log_probs


@final
class SetScore(enum.Enum):
    """How badly a label fits an input, by the probabilities p of all labels.

    For RAPS, give the probabilities to MAPIE: docs/howto/conformal.md says how.

    >>> SetScore.APS(torch.tensor([[0.7, 0.2, 0.1]]).log())
    tensor([[0.7000, 0.9000, 1.0000]])
    """

    # −log p(y|x), which ranks labels as 1 − p(y|x) does: the smallest sets on average ("least
    # ambiguous set-valued classifier", Sadinle et al. 2019).
    LAC = "LAC"
    # Σ p(k|x) over all k that are at least as probable as y: sets that grow with the difficulty of
    # the input ("adaptive prediction sets", Romano et al. 2020), here without randomisation.
    APS = "APS"

    def __call__(self, log_probs: Tensor) -> Tensor:
        """Return the scores (N, K) of all labels."""
        if self is SetScore.LAC:
            return -log_probs
        probs = log_probs.exp()
        descending, order = probs.sort(dim=1, descending=True)
        # The least probable label has a score of 1, not of 1 up to rounding: where a threshold is
        # 1, rounding would decide whether it is in a set.
        total = descending.cumsum(1)
        total = total / total[:, -1:]
        # Tied labels share the score of the last of them, so that their order does not matter.
        ends = torch.searchsorted(-descending, -descending, right=True) - 1
        return torch.empty_like(probs).scatter_(1, order, total.gather(1, ends))


# Bins of equal mass in which the likelihood ratio is estimated.
BINS = 10


@final
@dataclass(frozen=True, eq=False)
class Conformal:
    """Thresholds of scores, for prediction sets of a stated coverage.

    Attributes:
        score: of labels.
        coverage: that the sets have on data like the calibration data.
        thresholds: largest score in a set, for every label (K,), or for every bin of atypicality
            (bins,). It is infinite where there are too few calibration data.
        edges: of the bins of atypicality, if `fit_weighted` made them.
        effective: how many calibration data without weights say as much as these with weights. If
            it is small, sets are large and the coverage varies.

    >>> log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]]).log()
    >>> Conformal(SetScore.LAC, 0.9, thresholds=torch.full((3,), 1.0)).sets(log_probs)
    tensor([[ True, False, False],
            [ True,  True, False]])
    """

    score: SetScore
    coverage: float
    thresholds: Tensor
    edges: Tensor | None = None
    effective: float | None = None

    def sets(self, log_probs: Tensor, atypicality: Tensor | None = None) -> Tensor:
        """Return which labels are in the set of every input, (N, K) booleans.

        A set may be empty: no label fits as well as it does for most calibration data.

        Args:
            log_probs: log-probabilities (N, K).
            atypicality: scores m(x) of the inputs (N,), after `fit_weighted`.
        """
        if (self.edges is None) != (atypicality is None):
            raise ValueError("give the atypicality of the inputs after fit_weighted, and only then")
        own, limits = _as_tensor(log_probs), self.thresholds
        if self.edges is not None and atypicality is not None:
            bins = torch.bucketize(_as_tensor(atypicality).cpu().double(), self.edges)
            limits = limits[bins].unsqueeze(1)
        elif own.ndim != 2 or own.shape[1] != len(limits):
            shape = tuple(own.shape)
            raise ValueError(f"log_probs must have shape (N, {len(limits)}), got {shape}")
        sets = self.score(_checked_log_probs(own)) <= limits
        return sets.numpy() if isinstance(log_probs, np.ndarray) else sets


def fit(
    log_probs: Tensor, labels: Tensor, coverage: float = 0.9, score: SetScore = SetScore.LAC
) -> Conformal:
    """Return prediction sets that hold the label with a probability of at least `coverage`.

    That is on average over calibration data and new inputs that are exchangeable with them. Under
    shift, sets hold the label less often.

    Args:
        log_probs: log-probabilities (N, K) of the calibration data, a tensor or an array. Neither
            the network nor temperature and α may have seen these data.
        labels: class indices (N,).
        coverage: the probability, between 0 and 1.
        score: `SetScore.LAC` for small sets, `SetScore.APS` for adaptive ones.

    >>> log_probs = torch.log_softmax(torch.randn(500, 3), dim=1)
    >>> labels = torch.multinomial(log_probs.exp(), 1).squeeze(1)
    >>> fitted = fit(log_probs[:400], labels[:400], coverage=0.9)
    >>> fitted.sets(log_probs[400:]).shape  # True where a label is in the set
    torch.Size([100, 3])
    """
    scores = _scores_of_labels(log_probs, labels, coverage, score)
    return Conformal(score, coverage, _quantile(scores, coverage).repeat(log_probs.shape[1]))


def fit_by_class(
    log_probs: Tensor, labels: Tensor, coverage: float = 0.9, score: SetScore = SetScore.LAC
) -> Conformal:
    """Return prediction sets that hold the label with this probability for every class; see `fit`.

    They are larger than those of `fit` where some classes are harder than others.

    >>> log_probs, labels = torch.zeros(90, 3).log_softmax(1), torch.arange(90) % 3
    >>> fit_by_class(log_probs, labels).thresholds.shape  # one for every class
    torch.Size([3])
    """
    scores = _scores_of_labels(log_probs, labels, coverage, score)
    own = _as_tensor(labels).cpu()
    thresholds = [_quantile(scores[own == k], coverage) for k in range(log_probs.shape[1])]
    return Conformal(score, coverage, torch.stack(thresholds))


def fit_weighted(
    log_probs: Tensor,
    labels: Tensor,
    atypicality: Tensor,
    new_atypicality: Tensor,
    coverage: float = 0.9,
    score: SetScore = SetScore.LAC,
) -> Conformal:
    """Return prediction sets for inputs with other scores of atypicality than the calibration data.

    `atypicality` are the scores m(x) of the calibration data (N,), and `new_atypicality` those of
    unlabelled new inputs (M,), for the likelihood ratio. For the other arguments see `fit`.

    >>> log_probs, far = torch.zeros(99, 2).log_softmax(1), torch.linspace(0, 1, 99)
    >>> fitted = fit_weighted(log_probs, torch.zeros(99).long(), far, 0.5 + far / 2)
    >>> fitted.sets(log_probs[:2], far[:2]).shape
    torch.Size([2, 2])
    >>> round(fitted.effective)  # half of the bins have new inputs
    50
    """
    own = _scores_of_labels(log_probs, labels, coverage, score)
    ours, others = (_as_tensor(s).cpu().double() for s in (atypicality, new_atypicality))
    inner = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device="cpu")[1:-1]
    edges = torch.quantile(ours, inner)
    bins = torch.bucketize(ours, edges)
    here = torch.bincount(bins, minlength=BINS).double()
    there = torch.bincount(torch.bucketize(others, edges), minlength=BINS).double()
    ratio = (there / len(others)) / (here / len(ours)).clamp(min=1 / len(ours))
    weights, (ordered, order) = ratio[bins], own.sort()
    total = weights[order].cumsum(0)
    # An input in a bin has the weight of the bin, at a score of infinity.
    wanted = coverage * (total[-1] + ratio) - 1e-9 * total[-1]
    rank = torch.searchsorted(total, wanted)
    padded = torch.cat([ordered, ordered.new_tensor([math.inf])])
    effective = float(weights.sum() ** 2 / weights.square().sum())
    return Conformal(score, coverage, padded[rank], edges, effective)


def coverage_of(sets: Tensor, labels: Tensor) -> float:
    """Return the share of sets that hold the label.

    >>> coverage_of(torch.tensor([[True, False], [True, True]]), torch.tensor([1, 1]))
    0.5
    """
    own = _checked_sets(sets)
    at = _checked_labels(labels, *own.shape)
    return own.gather(1, at.unsqueeze(1)).double().mean().item()


def mean_size(sets: Tensor) -> float:
    """Return the mean number of labels in a set.

    >>> mean_size(torch.tensor([[True, False], [True, True]]))
    1.5
    """
    return _checked_sets(sets).double().sum(1).mean().item()


def _checked_sets(sets: Tensor) -> Tensor:
    """Check sets of at least one input and return them on the CPU."""
    own = _as_tensor(sets).cpu()
    if own.dtype != torch.bool or own.ndim != 2 or len(own) == 0:
        got = f"{own.dtype} of shape {tuple(own.shape)}"
        raise ValueError(f"sets must be booleans of shape (N, K) with N ≥ 1, got {got}")
    return own


def _scores_of_labels(
    log_probs: Tensor, labels: Tensor, coverage: float, score: SetScore
) -> Tensor:
    require_share(coverage, "coverage")
    own, at = _checked(log_probs, labels)
    return score(own).gather(1, at.unsqueeze(1)).squeeze(1)


def _quantile(scores: Tensor, coverage: float) -> Tensor:
    """Return the ⌈(n + 1)·coverage⌉-th smallest of n scores; ∞ if n is too small."""
    # Rounding must not raise (n + 1)·coverage above an integer that it equals. The rank is at least
    # 1, because the coverage is positive.
    rank = max(1, math.ceil((len(scores) + 1) * coverage - 1e-9))
    return scores.sort().values[rank - 1] if rank <= len(scores) else scores.new_tensor(math.inf)
