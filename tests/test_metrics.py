"""Metrics against values worked out by hand, against oracles, and their properties.

The oracles are scikit-learn and slow loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score
from torch import Tensor

from acnml import metrics

Metric = Callable[[Tensor, Tensor], float]
LABEL_METRICS: list[Metric] = [
    metrics.accuracy,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.aurc,
]
SCORE_METRICS: list[Metric] = [metrics.auroc, metrics.aupr, metrics.fpr95]
every_label_metric = pytest.mark.parametrize("metric", LABEL_METRICS)
every_score_metric = pytest.mark.parametrize("metric", SCORE_METRICS)
unhurried = settings(deadline=None)  # the first call into torch is slow


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def log_of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def top(*confidences: float) -> Tensor:
    """Two classes, class 0 predicted with these confidences: label 0 is correct, 1 is wrong."""
    return log_of(*([c, 1 - c] for c in confidences))


@st.composite
def predictions(draw, max_points=30, min_weight=0):
    """Rows w / Σw of small integers w: many tied confidences, some of them exactly 1."""
    classes = draw(st.integers(2, 4))
    weights = st.lists(st.integers(min_weight, 3), min_size=classes, max_size=classes).filter(any)
    rows = torch.tensor(draw(st.lists(weights, min_size=1, max_size=max_points))).double()
    label = st.integers(0, classes - 1)
    labels = draw(st.lists(label, min_size=len(rows), max_size=len(rows)))
    return (rows / rows.sum(dim=1, keepdim=True)).log(), torch.tensor(labels)


scores = st.lists(st.integers(-3, 3) | st.floats(-3, 3), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)

# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_probs", "labels", "bins", "expected"),
    [
        # bins {.6, .7} and {.8, .9}: |.5 - .65| and |1 - .85|, half of the points each
        (top(0.6, 0.9, 0.8, 0.7), [1, 0, 0, 0], 2, 0.15),
        # the tie {.8, .8} spans bins {.6, .8} and {.8, .9}: |.75 - .7| and |.75 - .85|
        (top(0.6, 0.8, 0.8, 0.9), [0, 0, 1, 0], 2, 0.075),
        # fewer points than bins: each is its own bin
        (top(0.6, 0.8), [0, 1], 20, (0.4 + 0.8) / 2),
        # all saturated: 1 - accuracy, whatever the bins
        (top(1, 1, 1, 1, 1), [0, 1, 0, 0, 1], 2, 0.4),
    ],
)
def test_ece_by_hand(log_probs, labels, bins, expected):
    assert metrics.ece(log_probs, torch.tensor(labels), bins) == exactly(expected)


def test_confidence_a_little_over_one_counts_as_one():
    log_probs = torch.tensor([[1e-3, -20.0], [0.0, -20.0], [1e-7, -20.0]])
    labels = torch.tensor([0, 0, 1])
    assert metrics.ece(log_probs, labels, bins=3) == exactly(1 / 3)


def test_an_impossible_label_costs_infinitely_much():
    log_probs, labels = log_of([1, 0], [1, 0]), torch.tensor([0, 1])
    assert metrics.nll(log_probs, labels) == math.inf
    assert metrics.brier(log_probs, labels) == 1


# Oracles ------------------------------------------------------------------------------------------


def pairs(log_probs: Tensor, labels: Tensor) -> list[tuple[float, bool]]:
    """(confidence, is it correct) of every point, by increasing confidence."""
    points = zip(log_probs.exp().tolist(), labels.tolist(), strict=True)
    return sorted((max(row), row.index(max(row)) == label) for row, label in points)


def slow_ece(log_probs: Tensor, labels: Tensor, bins: int) -> float:
    points = pairs(log_probs, labels)
    tied = {c: np.mean([a for other, a in points if other == c]) for c, _ in points}
    gaps = np.array([tied[c] - c for c, _ in points])
    return sum(abs(part.sum()) for part in np.array_split(gaps, bins)) / len(points)


def slow_risk(log_probs: Tensor, labels: Tensor) -> np.ndarray:
    """Mean over all orders that put the most confident first."""
    orders = itertools.permutations(pairs(log_probs, labels))
    sorted_orders = [o for o in orders if all(p[0] >= q[0] for p, q in itertools.pairwise(o))]
    wrong = np.array([[not correct for _, correct in order] for order in sorted_orders])
    return (wrong.cumsum(axis=1) / np.arange(1, wrong.shape[1] + 1)).mean(axis=0)


def slow_fpr95(in_scores: Tensor, out_scores: Tensor) -> float:
    def flagged(values: Tensor, threshold: float) -> Fraction:
        return Fraction(sum(v >= threshold for v in values.tolist()), len(values))

    catching = [t for t in out_scores.tolist() if flagged(out_scores, t) >= Fraction(95, 100)]
    return float(flagged(in_scores, max(catching)))


def sklearn_scores(function: Metric) -> Metric:
    def score(in_scores: Tensor, out_scores: Tensor) -> float:
        is_out = np.r_[np.zeros(len(in_scores)), np.ones(len(out_scores))]
        return function(is_out, torch.cat([in_scores, out_scores]).numpy())

    return score


@unhurried
@given(predictions(min_weight=1))  # log_loss clips probability 0
def test_likelihood_against_scikit_learn(data):
    log_probs, labels = data
    probs, classes = log_probs.exp().numpy(), range(log_probs.shape[1])
    one_hot = np.eye(len(classes))[labels]
    brier = np.mean(np.sum((probs - one_hot) ** 2, axis=1))
    assert metrics.summary(*data, bins=7) == {
        "accuracy": exactly(accuracy_score(labels, probs.argmax(axis=1))),
        "nll": exactly(log_loss(labels, probs, labels=classes)),
        "brier": exactly(brier),
        "ece": metrics.ece(*data, bins=7),
    }


@unhurried
@given(predictions(), st.integers(1, 40))
def test_ece_against_a_slow_loop(data, bins):
    assert metrics.ece(*data, bins=bins) == exactly(slow_ece(*data, bins))


@unhurried
@given(predictions(max_points=6))
def test_risk_coverage_against_all_orders(data):
    coverage, risk = metrics.risk_coverage(*data)
    expected, total = slow_risk(*data), len(data[1])
    assert coverage.tolist() == [i / total for i in range(1, total + 1)]
    assert risk.tolist() == exactly(expected.tolist())
    assert metrics.aurc(*data) == exactly(expected.mean())


@pytest.mark.parametrize(
    ("metric", "oracle"),
    [
        (metrics.auroc, sklearn_scores(roc_auc_score)),
        (metrics.aupr, sklearn_scores(average_precision_score)),
        (metrics.fpr95, slow_fpr95),
    ],
)
@unhurried
@given(in_scores=scores, out_scores=scores)
def test_scores_against_oracles(metric, oracle, in_scores, out_scores):
    assert metric(in_scores, out_scores) == exactly(oracle(in_scores, out_scores))


# Properties ---------------------------------------------------------------------------------------


@every_label_metric
@unhurried
@given(data=predictions(min_weight=1), seed=st.integers(0, 2**31))
def test_order_of_the_points_is_immaterial(metric, data, seed):
    log_probs, labels = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    assert metric(log_probs[order], labels[order]) == exactly(metric(log_probs, labels))


@unhurried
@given(data=predictions(), bins=st.integers(1, 40))
def test_bins_hold_every_point_once(data, bins):
    confidence, accuracy, count = metrics.reliability(*data, bins=bins)
    total = len(data[1])
    assert count.sum() == total
    assert 1 <= len(count) <= bins
    assert (count > 0).all()
    assert (confidence.diff() >= -1e-12).all()
    assert ((count * accuracy).sum() / total).item() == exactly(metrics.accuracy(*data))


@every_label_metric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_float64(metric, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 10, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (500,), generator=generator)
    log_probs = logits.log_softmax(dim=1)
    rounded = log_probs.to(dtype)
    assert metric(rounded, labels) == metric(rounded.double(), labels)
    if dtype == torch.float32:
        assert metric(rounded, labels) == pytest.approx(metric(log_probs, labels), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_is_no_error(dtype):
    classes = 1012  # in bfloat16 the row's sum is off by more than 1 %
    log_probs = torch.full((1, classes), -math.log(classes)).to(dtype)
    assert metrics.nll(log_probs, torch.tensor([3])) == -log_probs[0, 3].item()


# Refusals -----------------------------------------------------------------------------------------

GOOD, LABELS = top(0.9, 0.8, 0.6), torch.tensor([0, 1, 0])
NAN_ROW = GOOD + torch.tensor([[0.0], [math.nan], [0.0]])


@pytest.mark.parametrize(
    ("log_probs", "labels", "message"),
    [
        (GOOD[:, 0], LABELS, r"must be log-probabilities \(N, K\), got .* shape \(3,\)"),
        (GOOD[:0], LABELS[:0], r"N ≥ 1 points, got none"),
        (GOOD.long(), LABELS, "got torch.int64"),
        (GOOD, LABELS[:2], r"class indices of shape \(3,\), got torch.int64 of shape \(2,\)"),
        (GOOD, LABELS.float(), "got torch.float32"),
        (GOOD, LABELS * -100, r"labels\[1\] = -100 is outside 0..1"),
        (NAN_ROW, LABELS, r"log_probs\[1\] contains NaN"),
        (GOOD.exp(), LABELS, r"log_probs\[0\] sum to .*, not 1: apply log_softmax to logits, or"),
        (GOOD + torch.tensor([[0.0], [0.005], [0.02]]), LABELS, r"log_probs\[2\] sum to 1.02"),
    ],
)
def test_wrong_predictions_are_refused(log_probs, labels, message):
    for metric in (*LABEL_METRICS, metrics.reliability, metrics.risk_coverage):
        with pytest.raises(ValueError, match=message):
            metric(log_probs, labels)


@every_score_metric
def test_wrong_scores_are_refused(metric):
    with pytest.raises(ValueError, match=r"in_scores must be a vector"):
        metric(torch.zeros(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match=r"out_scores\[1\] is NaN"):
        metric(torch.zeros(2), torch.tensor([0.0, math.nan]))
