"""Sweeps over values: scores of all data, and invalid data and grids."""

from __future__ import annotations

import math

import pytest
import torch

from acnml import Classifier, Map, metrics, tuning
from acnml.tuning import Scores
from cases import normal
from tunable import Scaled, identity

X, Y = normal(40, 3, seed=3), torch.arange(40) % 3
DATA = [(X[:25], Y[:25]), (X[25:], Y[25:])]


def test_sweep_scores_all_data_for_every_value():
    rows = tuning.sweep(Scaled, [2.0, 0.5], DATA)
    assert [row.value for row in rows] == [2.0, 0.5]
    for row in rows:
        log_probs = (row.value * X).log_softmax(-1)
        assert row == Scores(row.value, **metrics.summary(log_probs, Y))


def test_sweep_goes_over_the_data_once_for_every_value():
    passes = []

    class Counting:
        def __iter__(self):
            passes.append(1)
            yield from DATA

    tuning.sweep(Scaled, [1.0, 2.0, 3.0], Counting())
    assert len(passes) == 3


@pytest.mark.parametrize("form", [lambda x, y: [x, y], lambda x, y: {"input": x, "labels": y}])
def test_batches_may_be_lists_or_mappings(form):
    def make(_: float) -> Map:
        return Map(Classifier(identity()))

    assert tuning.sweep(make, [1.0], [form(X, Y)]) == tuning.sweep(make, [1.0], [(X, Y)])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "the loader gave no batch"),
        ([(X, Y), X], ValueError, "batch 1: there are no labels: yield"),
        ([(X, Y.tolist())], TypeError, "batch 0: labels must be a tensor of integers, got list"),
        ([(X, Y.double())], TypeError, "batch 0: labels must be a tensor of integers.*float64"),
        ([(X, Y[:5])], ValueError, r"batch 0: labels have shape \(5,\), expected \(40,\)"),
        ([(X, Y), (X, Y + 1)], ValueError, "batch 1: label 3 is outside .* first at index 2"),
        ([(X * math.nan, Y)], ValueError, "log.prob.* NaN"),
        ([object()], TypeError, "batch 0: a loader must yield tuples"),
    ],
)
def test_refuses_bad_validation_data(data, error, message):
    with pytest.raises(error, match=message):
        tuning.sweep(Scaled, [1.0], data)
    with pytest.raises(error, match=message):
        tuning.temperature_by_nll(Scaled(), data)
