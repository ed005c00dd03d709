"""Naive CNML: seeds, independence of inputs, no side effects, and errors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from acnml import Classifier
from acnml._util.batches import map_inputs
from acnml.fit import Refit
from acnml.predictors import NaiveCnml, NaiveCnmlMax
from cases import MODELS, normal
from refitting import QUERIES, X, Y, regression


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_touches_neither_the_model_nor_the_random_state(case, mode):
    model, y = case.model().train(), torch.arange(3)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with mode():
        x = map_inputs(case.x(2), torch.clone)
        actual = NaiveCnml(Classifier(model), [(case.x(), y)], Refit(1))(x)
    torch.testing.assert_close(actual.exp().sum(1), torch.ones(2).double())
    assert not actual.requires_grad
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_result_does_not_depend_on_the_other_inputs():
    """An interrupted run can therefore continue with the remaining inputs."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    predict = NaiveCnmlMax(Classifier(regression()), loader, Refit(2, 0.5))
    x = normal(5, 2, seed=7)
    together = predict.log_lik(x)
    begun = predict.log_lik_each(x)
    first = [next(begun), next(begun)]
    torch.rand(3)  # what happens to the global random state meanwhile does not matter
    resumed = torch.stack([*first, *predict.log_lik_each(x[2:])])
    torch.testing.assert_close(resumed, together, rtol=0, atol=1e-10)
    alone = torch.cat([predict.log_lik(one[None]) for one in x])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-10)


def test_the_seed_decides_the_order_of_the_data():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True)
    first, again, other = (
        NaiveCnml(Classifier(regression()), loader, Refit(1, 0.5, seed=seed)).log_lik(QUERIES)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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
