"""Invalid arguments of naive CNML, and their error messages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from acnml import Classifier
from acnml.fit import Refit
from acnml.predictors import NaiveCnml
from refitting import QUERIES, X, Y, regression


@pytest.mark.parametrize(
    ("loader", "x", "message"),
    [
        (lambda: [], QUERIES, "the loader gave no batch"),
        (lambda: iter([(X, Y)]), QUERIES, "an iterator that was used before"),
        (lambda: [X], QUERIES, "batch 0: there are no labels"),
        (lambda: [(X, Y), (X, Y + 1)], QUERIES, "batch 1: label 3 is outside .* first at index 2"),
        (lambda: [(X, Y)], QUERIES * math.nan, "input x is NaN"),
        (lambda: [(1e6 * X, Y)], QUERIES, r"batch 0: .*lower the learning rate"),
    ],
)
def test_refuses_bad_data(loader, x, message):
    with pytest.raises(ValueError, match=message):
        NaiveCnml(Classifier(regression()), loader(), Refit(9, 1e300))(x)


def test_names_the_query_for_which_the_model_is_not_finite():
    model = regression()
    nn.init.constant_(model.weight, 1e200)
    x = QUERIES * torch.tensor([[1.0], [1e200]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"log-probabilities are NaN .* first at index 1; check"):
        NaiveCnml(Classifier(model), [(X, Y)])(x)
