"""Invalid arguments of metrics, and their error messages."""

from __future__ import annotations

import math

import pytest
import torch

from acnml import metrics
from metric_cases import DIAGRAMS, LABEL_METRICS, every_score_metric, top

GOOD, LABELS = top(0.9, 0.8, 0.6), torch.tensor([0, 1, 0])
NAN_ROW = GOOD + torch.tensor([[0.0], [math.nan], [0.0]])


class TestErrors:
    @pytest.mark.parametrize("metric", [*LABEL_METRICS, *DIAGRAMS, metrics.risk_coverage])
    @pytest.mark.parametrize(
        ("log_probs", "labels", "message"),
        [
            (GOOD[:, 0], LABELS, r"log_probs must have shape \(N, K\), got \(3,\)"),
            (GOOD[:0], LABELS[:0], r"log_probs is empty, shape \(0, 2\)"),
            (GOOD[:, :1], LABELS, r"log_probs has shape \(3, 1\): pass .* K ≥ 2 classes"),
            (GOOD.long(), LABELS, r"log_probs is torch.int64: pass floating-point"),
            (GOOD, LABELS[:2], r"labels must have shape \(3,\), got \(2,\)"),
            (GOOD, torch.eye(2)[LABELS], r"labels must have .* got \(3, 2\): pass class indices"),
            (GOOD, LABELS.float(), r"labels must be integers, got torch.float32: use .*long"),
            (GOOD, LABELS.bool(), r"labels must be integers, got torch.bool"),
            (GOOD, LABELS * 2, r"labels\[1\] = 2 is outside 0..1"),
            (GOOD, LABELS * -100, r"labels\[1\] = -100 is outside 0..1"),
            (NAN_ROW, LABELS, r"log_probs\[1\] contains NaN"),
            (GOOD + math.log(2), LABELS, r"log_probs\[0\] sum to 2, not 1: apply log_softmax"),
            (GOOD.exp(), LABELS, r"log_probs\[0\] .* log to probabilities"),
            (torch.full((3, 2), -math.inf), LABELS, r"log_probs\[0\] sum to 0, not 1"),
            (torch.full((3, 2), math.inf), LABELS, r"log_probs\[0\] sum to inf, not 1"),
        ],
    )
    def test_predictions(self, metric, log_probs, labels, message):
        with pytest.raises(ValueError, match=message):
            metric(log_probs, labels)

    @pytest.mark.parametrize("metric", [*LABEL_METRICS, *DIAGRAMS, metrics.risk_coverage])
    def test_lists(self, metric):
        with pytest.raises(TypeError, match=r"labels must be a tensor, got .*torch\.as_tensor"):
            metric(GOOD, LABELS.tolist())
        with pytest.raises(TypeError, match="log_probs must be a tensor, got"):
            metric(GOOD.tolist(), LABELS)

    @every_score_metric
    def test_lists_of_scores(self, metric):
        with pytest.raises(TypeError, match="out_scores must be a tensor, got list"):
            metric(torch.zeros(2), [1.0, 2.0])

    def test_first_row_that_does_not_sum_to_one_is_named(self):
        off = GOOD + torch.tensor([[0.0], [0.005], [0.02]])  # half a per cent may be rounding
        with pytest.raises(ValueError, match=r"log_probs\[2\] sum to 1.02, not 1"):
            metrics.nll(off, LABELS)

    @pytest.mark.parametrize("metric", [metrics.ece, metrics.ece_equal_width, *DIAGRAMS])
    @pytest.mark.parametrize("bins", [0, -3])
    def test_bins(self, metric, bins):
        with pytest.raises(ValueError, match=f"bins must be at least 1, got {bins}"):
            metric(GOOD, LABELS, bins=bins)

    @pytest.mark.parametrize("metric", [metrics.ece, metrics.ece_equal_width, *DIAGRAMS])
    @pytest.mark.parametrize("bins", [2.5, 2.0, True, "2"])
    def test_bins_are_integers(self, metric, bins):
        with pytest.raises(TypeError, match=f"bins must be an integer, got {bins!r}"):
            metric(GOOD, LABELS, bins=bins)

    @every_score_metric
    @pytest.mark.parametrize("name", ["in_scores", "out_scores"])
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (torch.tensor([]), " is empty: pass at least one score"),
            (torch.tensor([0.0, math.nan]), r"\[1\] is NaN"),
            (torch.zeros(2, 2), r" must be a vector, got shape \(2, 2\)"),
            (torch.tensor(0.0), r" must be a vector, got shape \(\)"),
        ],
    )
    def test_scores(self, metric, name, bad, message):
        arguments = {"in_scores": torch.zeros(2), "out_scores": torch.ones(2), name: bad}
        with pytest.raises(ValueError, match=f"^{name}{message}"):
            metric(**arguments)
