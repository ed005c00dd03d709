"""Shared by the tests of metrics: the list of metrics, random predictions and scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from acnml import metrics

Metric = Callable[[Tensor, Tensor], float]
LABEL_METRICS: list[Metric] = [
    metrics.accuracy,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.ece_equal_width,
    metrics.aurc,
]
SCORE_METRICS: list[Metric] = [metrics.auroc, metrics.aupr, metrics.fpr95]
DIAGRAMS = [metrics.reliability, metrics.reliability_equal_width]
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
