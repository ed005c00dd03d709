"""How good, how calibrated and how wary a prediction is.

Pure functions, in two families:

- of `(log_probs, labels)`, shapes `(N, K)` and `(N,)`: accuracy, likelihood, calibration and
  selective risk. Row n of `log_probs` is log p(·|xₙ); its largest entry is the prediction ŷₙ, and
  cₙ = p(ŷₙ|xₙ) is its confidence.
- of `(in_scores, out_scores)`, any two vectors: how well a score (higher = more out of
  distribution, for instance ACNML's regret) tells the two apart.

Everything is computed on the CPU in float64, whatever the input: a float32 sum over a large test
set loses the digits that are compared, and some accelerators have no float64. No value depends on
the order of the data: ties are averaged, never broken by position.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Reliability(NamedTuple):
    """A reliability diagram: its non-empty bins, by increasing confidence."""

    confidence: Tensor  # (bins,) mean confidence of the bin's points
    accuracy: Tensor  # (bins,) share of them that is predicted correctly
    count: Tensor  # type: ignore[assignment]  # (bins,) int64; hides tuple.count, which no one needs


class RiskCoverage(NamedTuple):
    """Selective risk, by increasing coverage 1/N, 2/N, …, 1."""

    coverage: Tensor  # (N,) share of the points, the most confident first, that is answered
    risk: Tensor  # (N,) error rate among the answered


def accuracy(log_probs: Tensor, labels: Tensor) -> float:
    """Share of points whose most probable class is the label.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> accuracy(log_probs, torch.tensor([0, 1]))  # of equal classes the first is the prediction
    0.5
    """
    log_probs, labels = _checked(log_probs, labels)
    return _correct(log_probs, labels).mean().item()


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood −1/N Σₙ log p(yₙ|xₙ), in nats; inf if a label has probability 0.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(nll(log_probs, torch.tensor([0, 1])), 4)
    0.4904
    """
    log_probs, labels = _checked(log_probs, labels)
    return functional.nll_loss(log_probs, labels).item()


def brier(log_probs: Tensor, labels: Tensor) -> float:
    """Brier score 1/N Σₙ Σₖ (p(k|xₙ) − [k = yₙ])², between 0 and 2.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(brier(log_probs, torch.tensor([0, 1])), 4)
    0.3125
    """
    log_probs, labels = _checked(log_probs, labels)
    errors = log_probs.exp()
    errors[torch.arange(len(labels)), labels] -= 1
    return errors.square().sum(dim=1).mean().item()


def ece(log_probs: Tensor, labels: Tensor, bins: int = 20) -> float:
    """ECE, the expected calibration error Σ_b (n_b/N) |acc_b − conf_b| over bins of equal mass.

    These are the bins of the ACNML paper; see `reliability`.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]).log()
    >>> round(ece(log_probs, torch.tensor([0, 0, 0, 1]), bins=2), 4)
    0.125
    """
    return _calibration_error(reliability(log_probs, labels, bins))


def ece_equal_width(log_probs: Tensor, labels: Tensor, bins: int = 20) -> float:
    """ECE, the expected calibration error Σ_b (n_b/N) |acc_b − conf_b| over bins of equal width."""
    return _calibration_error(reliability_equal_width(log_probs, labels, bins))


def reliability(log_probs: Tensor, labels: Tensor, bins: int = 20) -> Reliability:
    """Accuracy against confidence in bins of equal mass.

    The points, sorted by confidence, are split as `torch.tensor_split` does: the sizes differ by
    one at most, and every point is in one bin. With fewer points than bins each has its own.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> reliability(log_probs, torch.tensor([0, 0, 1]), bins=2).count
    tensor([2, 1])
    """
    _check_bins(bins)
    confidence, correct = _sorted_by_confidence(*_checked(log_probs, labels))
    parts = torch.arange(len(confidence)).tensor_split(bins)
    sizes = torch.tensor([len(part) for part in parts])
    return _binned(confidence, correct, torch.arange(bins).repeat_interleave(sizes))


def reliability_equal_width(log_probs: Tensor, labels: Tensor, bins: int = 20) -> Reliability:
    """Accuracy against confidence in the bins (i/B, (i+1)/B], i = 0 … B−1.

    Confidence 1 therefore belongs to the last bin, and every point to one bin.
    """
    _check_bins(bins)
    confidence, correct = _sorted_by_confidence(*_checked(log_probs, labels))
    inner_edges = torch.arange(1, bins, dtype=torch.float64) / bins
    return _binned(confidence, correct, torch.bucketize(confidence, inner_edges))


def risk_coverage(log_probs: Tensor, labels: Tensor) -> RiskCoverage:
    """Error rate among the i most confident points, i = 1 … N.

    Where confidences tie it is the expected value over a random order of the tied points.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> risk_coverage(log_probs, torch.tensor([0, 1])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    confidence, correct = _sorted_by_confidence(*_checked(log_probs, labels))
    errors = (1 - correct.flip(0)).cumsum(0)
    answered = torch.arange(1, len(confidence) + 1, dtype=torch.float64)
    return RiskCoverage(coverage=answered / len(confidence), risk=errors / answered)


def aurc(log_probs: Tensor, labels: Tensor) -> float:
    """Area under the risk-coverage curve: the mean of the risk over the coverages 1/N, …, 1."""
    return risk_coverage(log_probs, labels).risk.mean().item()


def auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """P(out score > in score) + ½ P(out score = in score): the area under the ROC curve.

    >>> auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    # Trapezoids give ties their half credit; twice the area keeps them in exact integers.
    twice_area = (in_flagged.diff() * (out_flagged[1:] + out_flagged[:-1])).sum().item()
    return twice_area / (2 * len(in_scores) * len(out_scores))


def aupr(in_scores: Tensor, out_scores: Tensor) -> float:
    """Average precision Σ_t (R_t − R_{t−1}) P_t over the distinct thresholds t; out is positive.

    R is the recall, P the precision of flagging every score ≥ t.

    >>> aupr(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])) == (1 + 2 / 3) / 2
    True
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    precision = out_flagged[1:].double() / (in_flagged + out_flagged)[1:]
    return (out_flagged.diff() * precision).sum().item() / len(out_scores)


def fpr95(in_scores: Tensor, out_scores: Tensor) -> float:
    """Share of in points flagged when at least 95 % of the out points are.

    A point is flagged if its score ≥ t; t is the strictest threshold that catches 95 %.

    >>> fpr95(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.0, 3.0]))
    0.5
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    # 95 % = 19/20 in integers: the rounding of 0.95 n must not ask for one point more.
    enough = 20 * out_flagged >= 19 * len(out_scores)
    return in_flagged[enough][0].item() / len(in_scores)


def summary(log_probs: Tensor, labels: Tensor, bins: int = 20) -> dict[str, float]:
    """Accuracy, NLL, Brier score and (equal-mass) ECE by name."""
    scores = {metric.__name__: metric(log_probs, labels) for metric in (accuracy, nll, brier)}
    return {**scores, "ece": ece(log_probs, labels, bins)}


# What they share -------------------------------------------------------------------------------


def _correct(log_probs: Tensor, labels: Tensor) -> Tensor:
    """1 where the prediction is the label, else 0."""
    # argmax, not max: only argmax promises the first of equal classes.
    return (log_probs.argmax(dim=1) == labels).double()


def _sorted_by_confidence(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending confidences, and each point's correctness averaged over its ties."""
    # Confidences tie in practice (saturated at 1), and a bin's edge or a coverage may fall inside
    # a tie. Which tied points come first would be an accident of the data's order, so each
    # stands for their mean: its expected correctness under a random order.
    confidence = log_probs.amax(dim=1).exp().clamp(max=1.0)  # rounding may exceed 1
    levels, level, counts = torch.unique(confidence, return_inverse=True, return_counts=True)
    correct = torch.bincount(level, weights=_correct(log_probs, labels)) / counts
    return levels.repeat_interleave(counts), correct.repeat_interleave(counts)


def _binned(confidence: Tensor, correct: Tensor, bin_index: Tensor) -> Reliability:
    """Means of the points that share a bin index, without the empty bins."""
    _, index, count = torch.unique(bin_index, return_inverse=True, return_counts=True)
    return Reliability(
        confidence=torch.bincount(index, weights=confidence) / count,
        accuracy=torch.bincount(index, weights=correct) / count,
        count=count,
    )


def _calibration_error(diagram: Reliability) -> float:
    gap = (diagram.accuracy - diagram.confidence).abs()
    return ((diagram.count * gap).sum() / diagram.count.sum()).item()


def _flagged(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Count the in and the out scores ≥ t: first none, then t = each distinct score, descending."""
    in_scores = _checked_scores(in_scores, "in_scores")
    out_scores = _checked_scores(out_scores, "out_scores")
    levels, level = torch.unique(torch.cat([in_scores, out_scores]), return_inverse=True)
    in_level, out_level = level.split([len(in_scores), len(out_scores)])
    return _count_from_top(in_level, len(levels)), _count_from_top(out_level, len(levels))


def _count_from_top(level: Tensor, levels: int) -> Tensor:
    at_level = torch.bincount(level, minlength=levels)
    return functional.pad(at_level.flip(0).cumsum(0), (1, 0))


# Checks ----------------------------------------------------------------------------------------


def _checked(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the CPU, as float64 and int64, or an error that names what is wrong with them."""
    _check_tensor(log_probs, "log_probs")
    _check_tensor(labels, "labels")
    _check_log_probs_form(log_probs)
    _check_labels_form(labels, len(log_probs))
    tolerance = _row_sum_tolerance(log_probs)
    log_probs, labels = log_probs.detach().cpu().double(), labels.cpu().long()
    _check_rows(log_probs, tolerance)
    _check_classes(labels, log_probs.shape[1])
    return log_probs, labels


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a tensor, got {kind}: use torch.as_tensor({name})")


def _check_log_probs_form(log_probs: Tensor) -> None:
    shape = tuple(log_probs.shape)
    if log_probs.ndim != 2:
        raise ValueError(f"log_probs must have shape (N, K), got {shape}: pass one row per point")
    if shape[0] == 0:
        raise ValueError(f"log_probs is empty, shape {shape}: pass at least one row")
    if shape[1] < 2:
        raise ValueError(f"log_probs has shape {shape}, fewer than 2 classes: pass a column each")
    if not log_probs.is_floating_point():
        raise ValueError(f"log_probs is {log_probs.dtype}: pass floating-point log-probabilities")


def _check_labels_form(labels: Tensor, points: int) -> None:
    shape = tuple(labels.shape)
    if shape != (points,):
        raise ValueError(f"labels must have shape ({points},), got {shape}: pass class indices")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}: use labels.long()")


def _row_sum_tolerance(log_probs: Tensor) -> float:
    """How far log Σₖ pₖ, the logarithm of a row's sum, may be from 0.

    Rounding moves log pₖ by at most ½ε |log pₖ|, hence the sum by about ½ε · entropy ≤ ½ε log K.
    Twice that is allowed, and never less than 1 %, for values that were rounded on their way here.
    """
    return max(1e-2, torch.finfo(log_probs.dtype).eps * math.log(log_probs.shape[1]))


def _check_rows(log_probs: Tensor, tolerance: float) -> None:
    row = _first(log_probs.isnan().any(dim=1))
    if row is not None:
        raise ValueError(f"log_probs[{row}] contains NaN: drop the row or mend the model")
    log_sums = log_probs.logsumexp(dim=1)
    row = _first(log_sums.abs() > tolerance)
    if row is not None:
        total = log_sums[row].exp().item()
        hint = "apply log_softmax to logits, or log to probabilities"
        raise ValueError(f"log_probs[{row}] has probabilities of sum {total:.4g}, not 1: {hint}")


def _check_classes(labels: Tensor, classes: int) -> None:
    row = _first((labels < 0) | (labels >= classes))
    if row is not None:
        label = f"labels[{row}] = {labels[row].item()}"
        raise ValueError(f"{label} is outside 0..{classes - 1}: drop or relabel the point")


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")


def _checked_scores(scores: Tensor, name: str) -> Tensor:
    _check_tensor(scores, name)
    if scores.ndim != 1:
        raise ValueError(f"{name} must be a vector, got shape {tuple(scores.shape)}: flatten it")
    if len(scores) == 0:
        raise ValueError(f"{name} is empty: pass at least one score")
    index = _first(scores.isnan())
    if index is not None:
        raise ValueError(f"{name}[{index}] is NaN: drop the point or mend the score")
    return scores.detach().cpu().double()


def _first(wrong: Tensor) -> int | None:
    """Index of the first True, if any."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None
