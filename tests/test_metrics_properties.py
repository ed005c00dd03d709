"""Properties of metrics that hold for all predictions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acnml import metrics
from metric_cases import (
    DIAGRAMS,
    LABEL_METRICS,
    every_label_metric,
    every_score_metric,
    exactly,
    predictions,
    scores,
    top,
    unhurried,
)


class TestProperties:
    @every_label_metric
    @unhurried
    @given(data=predictions(min_weight=1), seed=st.integers(0, 2**31))
    def test_order_of_the_points_is_immaterial(self, metric, data, seed):
        log_probs, labels = data
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        assert metric(log_probs[order], labels[order]) == exactly(metric(log_probs, labels))

    @every_score_metric
    @unhurried
    @given(in_scores=scores, out_scores=scores)
    def test_scores_depend_on_their_order_only(self, metric, in_scores, out_scores):
        shuffled = metric(in_scores.flip(0), out_scores.sort().values)
        rescaled = metric(8 * in_scores, 8 * out_scores)  # a power of two: no rounding, no new ties
        assert metric(in_scores, out_scores) == shuffled == rescaled

    @pytest.mark.parametrize("metric", [m for m in LABEL_METRICS if m is not metrics.nll])
    @unhurried
    @given(data=predictions())
    def test_range(self, metric, data):
        assert 0 <= metric(*data) <= (2 if metric is metrics.brier else 1)

    @every_score_metric
    @unhurried
    @given(in_scores=scores, out_scores=scores)
    def test_range_of_scores(self, metric, in_scores, out_scores):
        assert 0 <= metric(in_scores, out_scores) <= 1

    @unhurried
    @given(in_scores=scores, out_scores=scores)
    def test_auroc_is_antisymmetric(self, in_scores, out_scores):
        there, back = metrics.auroc(in_scores, out_scores), metrics.auroc(out_scores, in_scores)
        assert there + back == exactly(1)

    @every_label_metric
    @pytest.mark.parametrize("points", [1, 7, 50])
    def test_perfect_prediction(self, metric, points):
        labels = torch.arange(points) % 3
        log_probs = torch.eye(3)[labels].log()
        assert metric(log_probs, labels) == (1 if metric is metrics.accuracy else 0)

    @pytest.mark.parametrize("metric", [metrics.accuracy, metrics.nll, metrics.brier])
    @unhurried
    @given(data=predictions(min_weight=1))
    def test_doubled_data(self, metric, data):
        log_probs, labels = data
        assert metric(log_probs.repeat(2, 1), labels.repeat(2)) == exactly(metric(*data))

    @pytest.mark.parametrize("diagram", DIAGRAMS)
    @unhurried
    @given(data=predictions(), bins=st.integers(1, 40))
    def test_bins_hold_every_point_once(self, diagram, data, bins):
        confidence, accuracy, count = diagram(*data, bins=bins)
        total = len(data[1])
        assert count.sum() == total
        assert 1 <= len(count) <= bins
        assert (count > 0).all()
        assert (confidence.diff() >= -1e-12).all()
        assert ((count * accuracy).sum() / total).item() == exactly(metrics.accuracy(*data))

    @unhurried
    @given(data=predictions(), bins=st.integers(1, 40))
    def test_equal_mass_bins_have_nearly_equal_sizes(self, data, bins):
        points = torch.arange(len(data[1]))
        sizes = [len(part) for part in points.tensor_split(bins) if len(part)]
        assert metrics.reliability(*data, bins=bins).count.tolist() == sizes

    @every_label_metric
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_low_precision_is_computed_in_float64(self, metric, dtype):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(500, 10, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (500,), generator=generator)
        log_probs = logits.log_softmax(dim=1)
        rounded = log_probs.to(dtype)
        assert metric(rounded, labels) == metric(rounded.double(), labels)
        if dtype == torch.float32:
            assert metric(rounded, labels) == pytest.approx(metric(log_probs, labels), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_rounding_is_no_error(self, dtype):
        classes = 1012  # in bfloat16 the row's sum is off by more than 1 %
        log_probs = torch.full((1, classes), -math.log(classes)).to(dtype)
        assert metrics.nll(log_probs, torch.tensor([3])) == -log_probs[0, 3].item()

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
    def test_labels_of_any_integer_type(self, dtype):
        log_probs, labels = top(0.9, 0.8, 0.6), torch.tensor([0, 1, 0])
        assert metrics.summary(log_probs, labels.to(dtype)) == metrics.summary(log_probs, labels)

    @every_label_metric
    def test_result_is_a_float(self, metric):
        assert type(metric(top(0.9, 0.8).requires_grad_(), torch.tensor([0, 1]))) is float

    @pytest.mark.parametrize("curve", [*DIAGRAMS, metrics.risk_coverage])
    def test_curves_carry_no_gradients(self, curve):
        tensors = curve(top(0.9, 0.8).requires_grad_(), torch.tensor([0, 1]))
        assert not any(tensor.requires_grad for tensor in tensors)
