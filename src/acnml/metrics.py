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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class Reliability(NamedTuple):
    """The non-empty bins of a reliability diagram, by increasing confidence.

    >>> from acnml.metrics import Reliability
    >>> Reliability._fields
    ('confidence', 'accuracy', 'count')
    """

    confidence: Tensor  # (bins,) mean confidence of the points in the bin
    accuracy: Tensor  # (bins,) fraction of the points in the bin that are predicted correctly
    count: Tensor  # type: ignore[assignment]  # (bins,) int64 points per bin; hides tuple.count


class RiskCoverage(NamedTuple):
    """The risk-coverage curve of selective prediction, at the coverages 1/N, 2/N, …, 1.

    At coverage c, the model predicts only for the fraction c of points with the highest confidence.

    >>> from acnml.metrics import RiskCoverage
    >>> RiskCoverage._fields
    ('coverage', 'risk')
    """

    coverage: Tensor  # (N,) fraction of the points that receive a prediction
    risk: Tensor  # (N,) error rate among those points


def accuracy(log_probs: Tensor, labels: Tensor) -> float:
    """Return the fraction of points whose most probable class is the label.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> accuracy(log_probs, torch.tensor([0, 1]))  # of tied classes the first counts
    0.5
    """
    _, correct = confidences(log_probs, labels)
    return correct.mean().item()


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood −1/N Σₙ log p(yₙ|xₙ), in nats.

    It is infinite if a label has probability 0.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(nll(log_probs, torch.tensor([0, 1])), 4)
    0.4904
    """
    log_probs, labels = _checked(log_probs, labels)
    return functional.nll_loss(log_probs, labels).item()


def brier(log_probs: Tensor, labels: Tensor) -> float:
    """Return the Brier score 1/N Σₙ Σₖ (p(k|xₙ) − [k = yₙ])², between 0 and 2.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(brier(log_probs, torch.tensor([0, 1])), 4)
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

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]).log()
    >>> round(ece(log_probs, torch.tensor([0, 0, 0, 1]), bins=2), 4)
    0.125
    """
    return ece_of_confidences(*confidences(log_probs, labels), bins)


def reliability(log_probs: Tensor, labels: Tensor, bins: int = 20) -> Reliability:
    """Return accuracy against confidence in bins of equal mass.

    The points are sorted by confidence and split as in `torch.tensor_split`, so the sizes of bins
    differ by at most one. With fewer points than bins, each point has its own bin.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> reliability(log_probs, torch.tensor([0, 0, 1]), bins=2).count
    tensor([2, 1])
    """
    diagram = _equal_mass(*confidences(log_probs, labels), bins)
    return Reliability(*_like(log_probs, *diagram))


def risk_coverage(log_probs: Tensor, labels: Tensor) -> RiskCoverage:
    """Return the error rate among the i most confident points, i = 1 … N.

    If confidences tie, this is the expected value over a random order of the tied points.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> risk_coverage(log_probs, torch.tensor([0, 1])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    curve = _risk_coverage(*confidences(log_probs, labels))
    return RiskCoverage(*_like(log_probs, *curve))


def aurc(log_probs: Tensor, labels: Tensor) -> float:
    """Return the area under the risk-coverage curve, the mean risk at coverages 1/N, …, 1.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> round(aurc(log_probs, torch.tensor([0, 0, 1])), 4)
    0.1111
    """
    return aurc_of_confidences(*confidences(log_probs, labels))


def confidences(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence cₙ of every prediction, and 1 where it is correct and 0 elsewhere.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    >>> confidence, correct = confidences(log_probs, torch.tensor([0, 1]))
    >>> correct
    tensor([1., 0.], dtype=torch.float64)
    """
    log_probs, labels = _checked(log_probs, labels)
    confidence = log_probs.amax(dim=1).exp().clamp(max=1.0)  # rounding may exceed 1
    # argmax, not max: only argmax is documented to return the first of tied classes.
    return confidence, (log_probs.argmax(dim=1) == labels).double()


def ece_of_confidences(confidence: Tensor, correct: Tensor, bins: int = 20) -> float:
    """Return the ECE over bins of equal mass, as `ece`, from confidences and correctness.

    >>> correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> round(ece_of_confidences(correct / 4 + 0.5, correct, bins=2), 4)
    0.375
    """
    diagram = _equal_mass(*_checked_confidences(confidence, correct), bins)
    gap = (diagram.accuracy - diagram.confidence).abs()
    return ((diagram.count * gap).sum() / diagram.count.sum()).item()


def aurc_of_confidences(confidence: Tensor, correct: Tensor) -> float:
    """Return the area under the risk-coverage curve, as `aurc`, from the same.

    >>> correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> aurc_of_confidences(torch.tensor([0.75, 0.5], dtype=torch.float64), correct)
    0.25
    """
    return _risk_coverage(*_checked_confidences(confidence, correct)).risk.mean().item()


def auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """Return the area under the ROC curve, with out-of-distribution points as positives.

    It equals P(out score > in score) + ½ P(out score = in score).

    >>> auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
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

    >>> aupr(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])) == (1 + 2 / 3) / 2
    True
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    precision = out_flagged[1:].double() / (in_flagged + out_flagged)[1:]
    return (out_flagged.diff() * precision).sum().item() / len(out_scores)


def fpr95(in_scores: Tensor, out_scores: Tensor) -> float:
    """Return the false positive rate at a true positive rate of at least 95 %.

    This is the fraction of in-distribution points with a score ≥ t, where t is the highest
    threshold that at least 95 % of the out-of-distribution points reach.

    >>> fpr95(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.0, 3.0]))
    0.5
    """
    in_flagged, out_flagged = _flagged(in_scores, out_scores)
    # 95 % is written as 19/20 in integers, because rounding 0.95 n up could require an extra point.
    enough = 20 * out_flagged >= 19 * len(out_scores)
    return in_flagged[enough][0].item() / len(in_scores)


def summary(log_probs: Tensor, labels: Tensor, bins: int = 20) -> dict[str, float]:
    """Return accuracy, NLL, Brier score and equal-mass ECE by name.

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> list(summary(log_probs, torch.tensor([0, 0, 1])))
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

    >>> found = multilabel(torch.tensor([[0.75], [0.5]]), torch.tensor([[1], [0]]))
    >>> float(found["accuracy"].mean()), float(found["auroc"].mean())
    (1.0, 1.0)
    """
    chances, present = _as_tensor(probs).double(), _as_tensor(labels).long()
    scores = list[dict[str, float]]()
    for own, is_there in zip(chances.T, present.T, strict=True):
        log_probs = torch.stack([torch.log1p(-own), own.log()], dim=1)
        both = own[is_there == 0], own[is_there == 1]
        area = auroc(*both) if all(map(len, both)) else math.nan
        scores.append({**summary(log_probs, is_there, bins), "auroc": area})
    columns = {name: [each[name] for each in scores] for name in scores[0]}
    return {name: torch.tensor(own, dtype=torch.float64) for name, own in columns.items()}


# Helpers ---------------------------------------------------------------------------------------


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
    both = _checked_vector(in_scores, "in_scores"), _checked_vector(out_scores, "out_scores")
    levels, level = torch.unique(torch.cat(both), return_inverse=True)
    at_levels = [
        torch.bincount(own, minlength=len(levels)) for own in level.split([*map(len, both)])
    ]
    in_flagged, out_flagged = (functional.pad(n.flip(0).cumsum(0), (1, 0)) for n in at_levels)
    return in_flagged, out_flagged


def _like(given: object, *results: Tensor) -> tuple[Any, ...]:
    """Return results as arrays if an array was given."""
    return tuple(r.numpy() for r in results) if isinstance(given, np.ndarray) else results


# Checks ----------------------------------------------------------------------------------------


def _as_tensor(value: Tensor) -> Tensor:
    is_array = isinstance(value, np.ndarray)
    return torch.tensor(np.ascontiguousarray(value), device="cpu") if is_array else value


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
        shape = tuple(given.shape)
        raise ValueError(
            f"log_probs must be log-probabilities (N, K), got {given.dtype} of shape {shape}"
        )
    own = given.detach().cpu().double()
    if (row := _first(own.isnan().any(dim=1))) is not None:
        raise ValueError(f"log_probs[{row}] contains NaN: drop the row or fix the model")
    # With the machine epsilon ε, rounding changes log pₖ by at most ½ε |log pₖ|, and hence the
    # logarithm of a row's sum by about ½ε · entropy ≤ ½ε log K. The tolerance is twice that, and at
    # least 1 % for values that were rounded before they were passed in.
    tolerance = max(1e-2, torch.finfo(given.dtype).eps * math.log(max(1, own.shape[1])))
    log_sums = own.logsumexp(dim=1)
    if (row := _first(log_sums.abs() > tolerance)) is not None:
        total = f"{log_sums[row].exp():.4g}, not 1"
        hint = "apply log_softmax to logits, or log to probabilities"
        raise ValueError(f"the probabilities in log_probs[{row}] sum to {total}: {hint}")
    return own


def _checked_labels(labels: Tensor, points: int, classes: int) -> Tensor:
    """Check labels of so many points and return them on the CPU as int64."""
    own = _as_tensor(labels).cpu()
    if own.shape != (points,) or own.is_floating_point():
        got = f"{own.dtype} of shape {tuple(own.shape)}"
        raise ValueError(f"labels must be class indices of shape ({points},), got {got}")
    if (row := _first((own < 0) | (own >= classes))) is not None:
        label = f"labels[{row}] = {own[row].item()}"
        raise ValueError(f"{label} is outside 0..{classes - 1}: drop or relabel the point")
    return own.long()


def _checked_confidences(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Check both vectors and return them on the CPU as float64."""
    sure, right = _checked_vector(confidence, "confidence"), _checked_vector(correct, "correct")
    if len(sure) != len(right):
        raise ValueError(f"there are {len(sure)} confidences, but {len(right)} values of correct")
    if not ((sure >= 0) & (sure <= 1) & ((right == 0) | (right == 1))).all():
        raise ValueError("confidence must be probabilities from 0 to 1, and correct 0 or 1")
    return sure, right


def _checked_vector(values: Tensor, name: str) -> Tensor:
    """Check one number for every point and return them on the CPU as float64."""
    own = _as_tensor(values)
    if own.ndim != 1 or len(own) == 0:
        raise ValueError(f"{name} must be a vector (N,) with N ≥ 1, got {tuple(own.shape)}")
    if (index := _first(own.isnan())) is not None:
        raise ValueError(f"{name}[{index}] is NaN: drop the point or fix the score")
    return own.detach().cpu().double()


def _first(wrong: Tensor) -> int | None:
    """Return the index of the first True, or None."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None
