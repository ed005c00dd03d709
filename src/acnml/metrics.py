"""Metrics of accuracy, calibration, selective prediction and out-of-distribution detection.

All metrics are pure functions. There are three families:

- Functions of `(log_probs, labels)` with shapes `(N, K)` and `(N,)` measure accuracy, likelihood,
  calibration and selective risk. Row n of `log_probs` is log p(·|xₙ). Its largest entry belongs to
  the predicted class ŷₙ, and cₙ = p(ŷₙ|xₙ) is the confidence of that prediction.
- Functions of `(in_scores, out_scores)`, two vectors, measure how well a score separates
  in-distribution from out-of-distribution points. Higher scores mean "more out of distribution";
  ACNML's regret is such a score.
- Functions of `(confidence, correct)`, two vectors, are for data of which no more is known:
  `ece_of_confidences` and `aurc_of_confidences`. `confidences` computes the two vectors.

All metrics are computed on the CPU in float64: a float32 sum over a large test set is too
inaccurate to compare methods, and some accelerators do not support float64. No metric depends on
the order of the data, because ties are averaged and not broken by position.

Arguments may be NumPy arrays. `reliability` and `risk_coverage` then return arrays, too.
"""

import math
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class Reliability(NamedTuple):
    """The non-empty bins of a reliability diagram, by increasing confidence.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> found = acnml.metrics.reliability(log_probs, torch.tensor([0, 0, 1]), bins=2)
    >>> found.confidence - found.accuracy
    tensor([ 0.1250, -0.2500], dtype=torch.float64)
    """

    confidence: Tensor  # (bins,) mean confidence of the points in the bin
    accuracy: Tensor  # (bins,) fraction of the points in the bin that are predicted correctly
    count: Tensor  # type: ignore[assignment]  # (bins,) int64 points per bin; hides tuple.count


class RiskCoverage(NamedTuple):
    """The risk-coverage curve of selective prediction, at the coverages 1/N, 2/N, …, 1.

    At coverage c, the model predicts only for the fraction c of points with the highest confidence.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> acnml.metrics.risk_coverage(log_probs, torch.tensor([0, 0, 1])).coverage
    tensor([0.3333, 0.6667, 1.0000], dtype=torch.float64)
    """

    coverage: Tensor  # (N,) fraction of the points that receive a prediction
    risk: Tensor  # (N,) error rate among those points


def accuracy(log_probs: Tensor, labels: Tensor) -> float:
    """Return the fraction of points whose most probable class is the label.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> acnml.metrics.accuracy(log_probs, torch.tensor([0, 1]))  # of tied classes the first counts
    0.5
    """
    _, correct = confidences(log_probs, labels)
    return correct.mean().item()


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood −1/N Σₙ log p(yₙ|xₙ), in nats.

    It is infinite if a label has probability 0.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(acnml.metrics.nll(log_probs, torch.tensor([0, 1])), 4)
    0.4904
    """
    log_probs, labels = _checked(log_probs, labels)
    return functional.nll_loss(log_probs, labels).item()


def brier(log_probs: Tensor, labels: Tensor) -> float:
    """Return the Brier score 1/N Σₙ Σₖ (p(k|xₙ) − [k = yₙ])², between 0 and 2.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(acnml.metrics.brier(log_probs, torch.tensor([0, 1])), 4)
    0.3125
    """
    log_probs, labels = _checked(log_probs, labels)
    errors = log_probs.exp()
    errors[torch.arange(len(labels), device="cpu"), labels] -= 1
    return errors.square().sum(dim=1).mean().item()


def ece(log_probs: Tensor, labels: Tensor, bins: int = 20) -> float:
    """Return the expected calibration error (ECE) over bins of equal mass.

    It is Σ_b (n_b/N) |acc_b − conf_b|, with the number of points, the accuracy and the mean
    confidence of bin b. The ACNML paper uses the same bins; see `reliability`.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]).log()
    >>> round(acnml.metrics.ece(log_probs, torch.tensor([0, 0, 0, 1]), bins=2), 4)
    0.125
    """
    return ece_of_confidences(*confidences(log_probs, labels), bins)


def reliability(log_probs: Tensor, labels: Tensor, bins: int = 20) -> Reliability:
    """Return accuracy against confidence in bins of equal mass.

    The points are sorted by confidence and split as in `torch.tensor_split`, so the sizes of bins
    differ by at most one. With fewer points than bins, each point has its own bin.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> acnml.metrics.reliability(log_probs, torch.tensor([0, 0, 1]), bins=2).count
    tensor([2, 1])
    """
    diagram = _equal_mass(*confidences(log_probs, labels), bins)
    return _arrays_for_arrays(log_probs, diagram)


def risk_coverage(log_probs: Tensor, labels: Tensor) -> RiskCoverage:
    """Return the error rate among the i most confident points, i = 1 … N.

    If confidences tie, this is the expected value over a random order of the tied points.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> acnml.metrics.risk_coverage(log_probs, torch.tensor([0, 1])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    curve = _risk_coverage(*confidences(log_probs, labels))
    return _arrays_for_arrays(log_probs, curve)


def aurc(log_probs: Tensor, labels: Tensor) -> float:
    """Return the area under the risk-coverage curve, the mean risk at coverages 1/N, …, 1.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(acnml.metrics.aurc(log_probs, torch.tensor([0, 0, 1])), 4)
    0.1111
    """
    return aurc_of_confidences(*confidences(log_probs, labels))


def confidences(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence cₙ of every prediction, and 1 where it is correct and 0 elsewhere.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> confidence, correct = acnml.metrics.confidences(log_probs, torch.tensor([0, 1]))
    >>> correct
    tensor([1., 0.], dtype=torch.float64)
    """
    log_probs, labels = _checked(log_probs, labels)
    confidence = log_probs.amax(dim=1).exp().clamp(max=1.0)  # rounding may exceed 1
    # argmax, not max: only argmax is documented to return the first of tied classes.
    return confidence, (log_probs.argmax(dim=1) == labels).double()


def ece_of_confidences(confidence: Tensor, correct: Tensor, bins: int = 20) -> float:
    """Return the ECE over bins of equal mass, as `ece`, from confidences and correctness.

    >>> import acnml, torch
    >>> correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> round(acnml.metrics.ece_of_confidences(correct / 4 + 0.5, correct, bins=2), 4)
    0.375
    """
    diagram = _equal_mass(*_checked_confidences(confidence, correct), bins)
    gap = (diagram.accuracy - diagram.confidence).abs()
    return ((diagram.count * gap).sum() / diagram.count.sum()).item()


def aurc_of_confidences(confidence: Tensor, correct: Tensor) -> float:
    """Return the area under the risk-coverage curve, as `aurc`, from the same.

    >>> import acnml, torch
    >>> correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> acnml.metrics.aurc_of_confidences(torch.tensor([0.75, 0.5], dtype=torch.float64), correct)
    0.25
    """
    return _risk_coverage(*_checked_confidences(confidence, correct)).risk.mean().item()


def auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """Return the area under the ROC curve, with out-of-distribution points as positives.

    It equals P(out score > in score) + ½ P(out score = in score).

    >>> import acnml, torch
    >>> acnml.metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    # Trapezoids count ties as one half. Twice the area is an integer, so the sum is exact.
    twice_area = (in_flagged.diff() * (out_flagged[1:] + out_flagged[:-1])).sum().item()
    return twice_area / (2 * len(in_scores) * len(out_scores))


def aupr(in_scores: Tensor, out_scores: Tensor) -> float:
    """Return the average precision, with out-of-distribution points as positives.

    It is Σ_t (R_t − R_{t−1}) P_t over the distinct thresholds t, where R_t and P_t are the recall
    and the precision if every score ≥ t is flagged.

    >>> import acnml, torch
    >>> acnml.metrics.aupr(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])) == (1 + 2 / 3) / 2
    True
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    precision = out_flagged[1:].double() / (in_flagged + out_flagged)[1:]
    return (out_flagged.diff() * precision).sum().item() / len(out_scores)


def fpr95(in_scores: Tensor, out_scores: Tensor) -> float:
    """Return the false positive rate at a true positive rate of at least 95 %.

    This is the fraction of in-distribution points with a score ≥ t, where t is the highest
    threshold that at least 95 % of the out-of-distribution points reach.

    >>> import acnml, torch
    >>> acnml.metrics.fpr95(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.0, 3.0]))
    0.5
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    # 95 % is written as 19/20 in integers, because rounding 0.95 n up could require an extra point.
    enough = 20 * out_flagged >= 19 * len(out_scores)
    return in_flagged[enough][0].item() / len(in_scores)


def summary(log_probs: Tensor, labels: Tensor, bins: int = 20) -> dict[str, float]:
    """Return accuracy, NLL, Brier score and equal-mass ECE by name.

    >>> import acnml, torch
    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> list(acnml.metrics.summary(log_probs, torch.tensor([0, 0, 1])))
    ['accuracy', 'nll', 'brier', 'ece']
    """
    scores = {metric.__name__: metric(log_probs, labels) for metric in (accuracy, nll, brier)}
    return {**scores, "ece": ece(log_probs, labels, bins)}


def multilabel(probs: Tensor, labels: Tensor, bins: int = 20) -> dict[str, Tensor]:
    """Return the scores of independent labels by name, for every label (K,).

    The mean over labels is the macro average. Each label counts as two classes, absent and present:
    accuracy, NLL, Brier score (between 0 and 2) and ECE are those of `summary`. `auroc` says how
    well its probability separates the points that have the label from the others; it is NaN if
    there are none of either.

    Args:
        probs: probabilities of presence (N, K).
        labels: 1 for labels that are present, and 0 for the others (N, K).
        bins: of the ECE.

    >>> import acnml, torch
    >>> found = acnml.metrics.multilabel(torch.tensor([[0.75], [0.5]]), torch.tensor([[1], [0]]))
    >>> float(found["accuracy"].mean()), float(found["auroc"].mean())
    (1.0, 1.0)
    """
    chances, present = _as_tensor(probs).double(), _as_tensor(labels).long()
    scores = [
        _of_label(own, is_there, bins) for own, is_there in zip(chances.T, present.T, strict=True)
    ]
    return {
        name: torch.tensor([each[name] for each in scores], dtype=torch.float64)
        for name in scores[0]
    }


def _of_label(probs: Tensor, labels: Tensor, bins: int) -> dict[str, float]:
    """Return the scores of one label from probabilities of its presence (N,)."""
    log_probs = torch.stack([torch.log1p(-probs), probs.log()], dim=1)
    absent, present = probs[labels == 0], probs[labels == 1]
    is_known = len(absent) > 0 and len(present) > 0
    area = auroc(absent, present) if is_known else math.nan
    return {**summary(log_probs, labels, bins), "auroc": area}


# Helpers ---------------------------------------------------------------------------------------

Result = TypeVar("Result", Reliability, RiskCoverage)


def _arrays_for_arrays(given: object, result: Result) -> Result:
    """Return the result as arrays if an array was given."""
    if not isinstance(given, np.ndarray):
        return result
    return result._replace(**{name: t.numpy() for name, t in result._asdict().items()})


def _equal_mass(confidence: Tensor, correct: Tensor, bins: int) -> Reliability:
    """Average over bins of equal mass, without empty ones."""
    confidence, correct = _sorted_by_confidence(confidence, correct)
    count = torch.tensor([len(part) for part in confidence.tensor_split(bins)], device="cpu")
    own = torch.arange(bins, device="cpu").repeat_interleave(count)
    filled = count > 0
    sums = [torch.bincount(own, weights=part, minlength=bins) for part in (confidence, correct)]
    confidence, accuracy = (each[filled] / count[filled] for each in sums)
    return Reliability(confidence, accuracy, count[filled])


def _risk_coverage(confidence: Tensor, correct: Tensor) -> RiskCoverage:
    confidence, correct = _sorted_by_confidence(confidence, correct)
    errors = (1 - correct.flip(0)).cumsum(0)
    answered = torch.arange(1, len(errors) + 1, dtype=torch.float64, device="cpu")
    return RiskCoverage(coverage=answered / len(errors), risk=errors / answered)


def _sorted_by_confidence(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidences in ascending order, and correctness averaged over ties."""
    # Confidences tie in practice (saturated at 1), and a bin edge or a coverage may fall inside a
    # tie. The result must not depend on the order of the data, so each tied point gets the mean
    # correctness of all points tied with it: the expected value under a random order.
    levels, level, counts = torch.unique(confidence, return_inverse=True, return_counts=True)
    correct = torch.bincount(level, weights=correct) / counts
    return levels.repeat_interleave(counts), correct.repeat_interleave(counts)


def _flagged(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Count the in and out scores ≥ t for each distinct score t, descending, after a first 0."""
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
    """Check both arguments, of at least one point; return them on the CPU as float64 and int64."""
    own = _checked_log_probs(log_probs)
    if len(own) == 0:
        raise ValueError("log_probs must be log-probabilities (N, K) of N ≥ 1 points, got none")
    return own, _checked_labels(labels, *own.shape)


def _checked_log_probs(log_probs: Tensor) -> Tensor:
    """Check log-probabilities and return them on the CPU as float64."""
    given = _as_tensor(log_probs)
    if given.ndim != 2 or not given.is_floating_point():
        raise ValueError(
            f"log_probs must be log-probabilities (N, K), got {given.dtype} of shape "
            f"{tuple(given.shape)}"
        )
    own = given.detach().cpu().double()
    row = _first(own.isnan().any(dim=1))
    if row is not None:
        raise ValueError(f"log_probs[{row}] contains NaN: drop the row or fix the model")
    # With the machine epsilon ε, rounding changes log pₖ by at most ½ε |log pₖ|, and hence the
    # logarithm of a row's sum by about ½ε · entropy ≤ ½ε log K. The tolerance is twice that, and at
    # least 1 % for values that were rounded before they were passed in.
    tolerance = max(1e-2, torch.finfo(given.dtype).eps * math.log(max(1, own.shape[1])))
    log_sums = own.logsumexp(dim=1)
    row = _first(log_sums.abs() > tolerance)
    if row is not None:
        total = log_sums[row].exp().item()
        hint = "apply log_softmax to logits, or log to probabilities"
        raise ValueError(f"the probabilities in log_probs[{row}] sum to {total:.4g}, not 1: {hint}")
    return own


def _checked_labels(labels: Tensor, points: int, classes: int) -> Tensor:
    """Check labels of so many points and return them on the CPU as int64."""
    labels = _as_tensor(labels).cpu()
    if labels.shape != (points,) or labels.is_floating_point():
        raise ValueError(
            f"labels must be class indices of shape ({points},), got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    row = _first((labels < 0) | (labels >= classes))
    if row is not None:
        label = f"labels[{row}] = {labels[row].item()}"
        raise ValueError(f"{label} is outside 0..{classes - 1}: drop or relabel the point")
    return labels.long()


def _as_tensor(value: Tensor) -> Tensor:
    is_array = isinstance(value, np.ndarray)
    return torch.tensor(np.ascontiguousarray(value), device="cpu") if is_array else value


def _checked_confidences(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Check both vectors and return them on the CPU as float64."""
    confidence, correct = _as_tensor(confidence), _as_tensor(correct)
    if confidence.ndim != 1 or len(confidence) == 0 or correct.shape != confidence.shape:
        shapes = f"{tuple(confidence.shape)} and {tuple(correct.shape)}"
        raise ValueError(
            f"confidence and correct must be vectors of one length N ≥ 1, got {shapes}"
        )
    confidence, correct = confidence.detach().cpu().double(), correct.detach().cpu().double()
    if not ((confidence >= 0) & (confidence <= 1) & ((correct == 0) | (correct == 1))).all():
        raise ValueError("confidence must be probabilities from 0 to 1, and correct 0 or 1")
    return confidence, correct


def _checked_scores(scores: Tensor, name: str) -> Tensor:
    scores = _as_tensor(scores)
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must be a vector (N,) with N ≥ 1, got {tuple(scores.shape)}")
    index = _first(scores.isnan())
    if index is not None:
        raise ValueError(f"{name}[{index}] is NaN: drop the point or fix the score")
    return scores.detach().cpu().double()


def _first(wrong: Tensor) -> int | None:
    """Return the index of the first True, or None."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None
