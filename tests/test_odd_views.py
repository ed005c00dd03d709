"""Models that are hard to view: in-place changes, wrappers, gradient modes, precisions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import acnml
from acnml import Acnml, Bma, Classifier, Gradient, Map
from cases import CONV, MODELS, diagonal, normal


def test_inputs_that_depend_on_each_other_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\) has no running statistics"):
        Classifier(model)


def test_plain_tensors_that_the_model_writes_to_stay_as_they_are():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 3), torch.zeros(1)

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    model = Counting()
    Map(Classifier(model))(torch.ones(1, 4))
    assert torch.equal(model.calls, torch.zeros(1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_works_in_any_gradient_mode(mode):
    model = MODELS[1].model()
    y = torch.tensor([0, 1, 2])
    expected = Acnml(Classifier(model), diagonal(model))(normal(3, 4))
    with mode():
        x = normal(3, 4)
        classifier = Classifier(model)
        torch.testing.assert_close(Acnml(classifier, diagonal(model))(x), expected)
        Bma(classifier, diagonal(model))(x)
        acnml.Glm(classifier, diagonal(model))(x)
        acnml.fit_laplace(classifier, [(x, y)])
        acnml.fit_bayes_by_backprop(classifier, [(x, y)], epochs=1)
        acnml.fit_swag(classifier, [(x, y)], epochs=2, learning_rate=0.5)


def test_a_copy_of_a_model_made_in_inference_mode_can_be_used():
    with torch.inference_mode():
        model = CONV.model()
    data = [(CONV.x(), torch.tensor([0, 1, 2]))]
    actual = acnml.fit_laplace(copy.deepcopy(model), data, structure="diag").var
    expected = acnml.fit_laplace(CONV.model(), data, structure="diag").var
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_model_may_write_to_its_input():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x.sub_(0.5).div_(0.25))))

    model, x = InPlace().double(), normal(3, 4)
    given, pure = x.clone(), (normal(3, 4) - 0.5) / 0.25
    plain = nn.Sequential(model.body, nn.Tanh(), model.head)
    for build in (
        Map,
        lambda c: Acnml(c, diagonal(c.model), on_unsolved="ignore"),
        lambda c: Bma(c, diagonal(c.model)),
    ):
        torch.testing.assert_close(
            build(Classifier(model))(x), build(Classifier(plain))(pure), rtol=0, atol=1e-12
        )
    assert torch.equal(x, given)


def test_a_model_that_is_random_in_eval_mode_is_named():
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(functional.dropout(self.body(x), 0.5))

    model = Random().double()
    with pytest.raises(ValueError, match="random even in eval mode"):
        Gradient(2, 0.3)(Classifier(model), diagonal(model), normal(3, 4))


def test_inputs_of_a_model_in_two_precisions_stay_as_they_are():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.trunk(x.bfloat16()).float() + x)

    model, x = Mixed(), normal(5, 4).float()
    expected = model(x).log_softmax(-1)
    torch.testing.assert_close(Map(Classifier(model))(x), expected, rtol=0, atol=1e-6)


def test_wrappers_are_removed():
    model = nn.Linear(4, 3)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert Classifier(wrapped).model is model
        swag = acnml.Swag()
        swag.update(wrapped)
        assert list(swag.mean) == ["weight", "bias"]
