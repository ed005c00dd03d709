"""Metrics against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from acnml import metrics
from metric_cases import exactly, log_of, top


class TestByHand:
    @pytest.mark.parametrize(
        ("log_probs", "labels", "bins", "expected"),
        [
            # bins {.6, .7} and {.8, .9}: |.5 - .65| and |1 - .85|, half of the points each
            (top(0.6, 0.9, 0.8, 0.7), [1, 0, 0, 0], 2, 0.15),
            # five points in two bins: three, then two
            (top(0.6, 0.6, 0.6, 0.8, 0.8), [0, 0, 0, 0, 1], 2, 0.6 * 0.4 + 0.4 * 0.3),
            # a tie over the bins' edge: half right in either bin, whichever comes first
            (top(0.75, 0.75, 0.75, 0.75), [0, 0, 1, 1], 2, 0.25),
            (top(0.75, 0.75, 0.75, 0.75), [1, 0, 1, 0], 2, 0.25),
            # the tie {.8, .8} spans bins {.6, .8} and {.8, .9}: |.75 - .7| and |.75 - .85|
            (top(0.6, 0.8, 0.8, 0.9), [0, 0, 1, 0], 2, 0.075),
            # fewer points than bins: each is its own bin
            (top(0.6, 0.8), [0, 1], 20, (0.4 + 0.8) / 2),
            (top(0.6), [1], 20, 0.6),
            # all saturated: 1 - accuracy, whatever the bins
            (top(1, 1, 1, 1, 1), [0, 1, 0, 0, 1], 20, 0.4),
            (top(1, 1, 1, 1, 1), [0, 1, 0, 0, 1], 2, 0.4),
        ],
    )
    def test_ece(self, log_probs, labels, bins, expected):
        assert metrics.ece(log_probs, torch.tensor(labels), bins) == exactly(expected)

    @pytest.mark.parametrize(
        ("log_probs", "labels", "bins", "confidence", "accuracy", "count"),
        [
            # an edge belongs to the bin below it, and 1 to the last bin
            (top(0.5, 0.625, 0.75, 1), [0, 1, 0, 0], 4, [0.5, 0.6875, 1], [1, 0.5, 1], [1, 2, 1]),
            (top(1, 1, 1), [0, 0, 1], 20, [1], [2 / 3], [3]),
            (top(0.5, 1), [0, 1], 1, [0.75], [0.5], [2]),
        ],
    )
    def test_equal_width(self, log_probs, labels, bins, confidence, accuracy, count):
        diagram = metrics.reliability_equal_width(log_probs, torch.tensor(labels), bins)
        assert diagram.confidence.tolist() == exactly(confidence)
        assert diagram.accuracy.tolist() == exactly(accuracy)
        assert diagram.count.tolist() == count

    def test_equal_width_edges_are_the_nearest_floats(self):
        log_probs, labels = top(0.545, 0.55, 0.555), torch.tensor([0, 0, 0])
        # A bin found by rounding confidence × bins up would be one too high here.
        assert log_probs[1, 0].exp().item() == 0.55 == 55 / 100
        assert 0.55 * 100 > 55
        diagram = metrics.reliability_equal_width(log_probs, labels, bins=100)
        assert diagram.count.tolist() == [2, 1]

    def test_confidence_a_little_over_one_counts_as_one(self):
        log_probs = torch.tensor([[1e-3, -20.0], [0.0, -20.0], [1e-7, -20.0]])
        labels = torch.tensor([0, 0, 1])
        assert metrics.ece_equal_width(log_probs, labels) == exactly(1 / 3)
        assert metrics.ece(log_probs, labels, bins=3) == exactly(1 / 3)

    @pytest.mark.parametrize(
        ("log_probs", "labels", "risk"),
        [
            (top(0.6, 0.9, 0.8), [0, 0, 1], [0, 1 / 2, 1 / 3]),
            (top(0.9, 0.7, 0.7), [0, 0, 1], [0, 1 / 4, 1 / 3]),
            (top(1, 1, 1, 1), [0, 0, 0, 1], [1 / 4] * 4),
        ],
    )
    def test_risk_coverage(self, log_probs, labels, risk):
        assert metrics.risk_coverage(log_probs, torch.tensor(labels)).risk.tolist() == exactly(risk)

    @pytest.mark.parametrize(
        ("in_scores", "out_scores", "auroc", "aupr", "fpr95"),
        [
            ([0, 1], [2, 3], 1, 1, 0),
            ([2, 3], [0, 1], 0, (1 / 3 + 2 / 4) / 2, 1),
            ([1, 1, 1], [1], 1 / 2, 1 / 4, 1),
            ([0, 1], [1, 2], 7 / 8, (1 + 2 / 3) / 2, 1 / 2),
            ([-math.inf, 0], [0, math.inf], 7 / 8, (1 + 2 / 3) / 2, 1 / 2),
            (
                [1, 3],
                [0] + [2] * 19,
                19 / 40,
                0.95 * 19 / 20 + 0.05 * 20 / 22,
                1 / 2,
            ),  # 95 % will do
            ([1, 3], [0] + [2] * 18, 18 / 38, (18 * 18 / 19 + 19 / 21) / 19, 1),  # 18/19 will not
        ],
    )
    def test_scores(self, in_scores, out_scores, auroc, aupr, fpr95):
        both = torch.tensor(in_scores), torch.tensor(out_scores)
        assert metrics.auroc(*both) == exactly(auroc)
        assert metrics.aupr(*both) == exactly(aupr)
        assert metrics.fpr95(*both) == exactly(fpr95)

    def test_labels_of_a_single_class(self):
        log_probs, labels = log_of([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]), torch.tensor([2, 2])
        assert metrics.summary(log_probs, labels) == {
            "accuracy": 0,
            "nll": exactly(math.log(4)),
            "brier": exactly(0.75**2 + 0.25**2 + 0.5**2),
            "ece": exactly(0.5),
        }

    def test_an_impossible_label_costs_infinitely_much(self):
        log_probs, labels = log_of([1, 0], [1, 0]), torch.tensor([0, 1])
        assert metrics.nll(log_probs, labels) == math.inf
        assert metrics.brier(log_probs, labels) == 1

    def test_of_equal_classes_the_first_is_predicted(self):
        assert metrics.accuracy(log_of([0.5, 0.5], [0.5, 0.5]), torch.tensor([0, 1])) == 0.5
