"""Metrics against scikit-learn and against slow loops."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score
from torch import Tensor

from acnml import metrics
from metric_cases import Metric, exactly, predictions, scores, unhurried


def pairs(log_probs: Tensor, labels: Tensor) -> list[tuple[float, bool]]:
    """(confidence, is it correct) of every point, by increasing confidence."""
    points = zip(log_probs.exp().tolist(), labels.tolist(), strict=True)
    return sorted((max(row), row.index(max(row)) == label) for row, label in points)


def slow_ece(bins: list[list[tuple[float, float]]], total: int) -> float:
    return sum(
        len(b) / total * abs(np.mean([a for _, a in b]) - np.mean([c for c, _ in b]))
        for b in bins
        if b
    )


def slow_equal_mass(log_probs: Tensor, labels: Tensor, bins: int) -> float:
    points = pairs(log_probs, labels)
    tied = {c: np.mean([a for other, a in points if other == c]) for c, _ in points}
    averaged = [(c, tied[c]) for c, _ in points]
    split = [[averaged[i] for i in part] for part in np.array_split(range(len(points)), bins)]
    return slow_ece(split, len(points))


def slow_equal_width(log_probs: Tensor, labels: Tensor, bins: int) -> float:
    points = [(min(c, 1.0), a) for c, a in pairs(log_probs, labels)]
    split = [[p for p in points if i / bins < p[0] <= (i + 1) / bins] for i in range(bins)]
    return slow_ece(split, len(points))


def slow_risk(log_probs: Tensor, labels: Tensor) -> np.ndarray:
    """Mean over all orders that put the most confident first."""
    orders = itertools.permutations(pairs(log_probs, labels))
    sorted_orders = [o for o in orders if all(p[0] >= q[0] for p, q in itertools.pairwise(o))]
    wrong = np.array([[not correct for _, correct in order] for order in sorted_orders])
    return (wrong.cumsum(axis=1) / np.arange(1, wrong.shape[1] + 1)).mean(axis=0)


def slow_auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    wins = [(o > i) + (o == i) / 2 for o in out_scores.tolist() for i in in_scores.tolist()]
    return sum(wins) / len(wins)


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


class TestAgainstOracles:
    @unhurried
    @given(predictions(min_weight=1))  # log_loss clips probability 0
    def test_likelihood(self, data):
        log_probs, labels = data
        probs, classes = log_probs.exp().numpy(), range(log_probs.shape[1])
        one_hot = np.eye(len(classes))[labels]
        brier = np.mean(np.sum((probs - one_hot) ** 2, axis=1))
        assert metrics.accuracy(*data) == exactly(accuracy_score(labels, probs.argmax(axis=1)))
        assert metrics.nll(*data) == exactly(log_loss(labels, probs, labels=classes))
        assert metrics.brier(*data) == exactly(brier)

    @unhurried
    @given(predictions(), st.integers(1, 40))
    def test_ece(self, data, bins):
        assert metrics.ece(*data, bins=bins) == exactly(slow_equal_mass(*data, bins))
        assert metrics.ece_equal_width(*data, bins=bins) == exactly(slow_equal_width(*data, bins))

    @unhurried
    @given(predictions(max_points=6))
    def test_risk_coverage(self, data):
        coverage, risk = metrics.risk_coverage(*data)
        expected, total = slow_risk(*data), len(data[1])
        assert coverage.tolist() == [i / total for i in range(1, total + 1)]
        assert risk.tolist() == exactly(expected.tolist())
        assert metrics.aurc(*data) == exactly(expected.mean())

    @pytest.mark.parametrize(
        ("metric", "oracle"),
        [
            (metrics.auroc, slow_auroc),
            (metrics.auroc, sklearn_scores(roc_auc_score)),
            (metrics.aupr, sklearn_scores(average_precision_score)),
            (metrics.fpr95, slow_fpr95),
        ],
    )
    @unhurried
    @given(in_scores=scores, out_scores=scores)
    def test_scores(self, metric, oracle, in_scores, out_scores):
        assert metric(in_scores, out_scores) == exactly(oracle(in_scores, out_scores))

    def test_many_scores_need_no_matrix(self):
        generator = torch.Generator().manual_seed(0)
        in_scores, out_scores = torch.randn(2, 200_000, generator=generator).mul(100).round()
        for metric, oracle in [
            (metrics.auroc, roc_auc_score),
            (metrics.aupr, average_precision_score),
        ]:
            expected = sklearn_scores(oracle)(in_scores, out_scores)
            assert metric(in_scores, out_scores) == exactly(expected)
