"""Choosing the temperature, against scipy and the slope at the optimum."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import optimize
from torch import Tensor

from acnml import Classifier, Map, Tempered, metrics, tuning
from cases import normal
from tunable import Scaled, identity


def nll_tempered(temperature: float, x: Tensor, y: Tensor) -> float:
    return metrics.nll((x / temperature).log_softmax(-1), y)


def learnable(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Logits that are informative about the labels, but not perfectly."""
    y = torch.arange(60) % 3
    x = normal(60, 3, seed=seed)
    x[torch.arange(60), y] += 0.7
    return scale * x, y


@pytest.mark.parametrize("scale", [1e-4, 0.3, 1.0, 20.0, 1e5])
@pytest.mark.parametrize("seed", range(3))
def test_temperature_equals_scipys(seed, scale):
    x, y = learnable(seed, scale)
    around = math.log(scale)
    expected = optimize.minimize_scalar(
        lambda u: nll_tempered(math.exp(u), x, y),
        bounds=(around - 5, around + 5),
        options={"xatol": 1e-9},
    )
    choice = tuning.temperature_by_nll(Scaled(), [(x, y)])
    # The NLL is flat at its minimum: scipy, which sees no slopes, knows T to √ε only.
    assert choice.value == pytest.approx(math.exp(expected.x), rel=1e-6)
    assert min(row.nll for row in choice.table) <= expected.fun + 1e-12


def test_a_calibrated_predictor_keeps_its_temperature():
    """Labels in the very proportions that the predictor gives them."""
    x = torch.tensor([[0.5, 0.25, 0.25]] * 4 + [[0.25, 0.75, 1e-30]] * 4).double().log()
    y = torch.tensor([0, 0, 1, 2, 0, 1, 1, 1])
    choice = tuning.temperature_by_nll(Scaled(), [(x, y)])
    assert choice.value == pytest.approx(1.0, rel=1e-10)


def test_tempered_predictors_and_classifiers_have_the_tables_nll():
    x, y = learnable(1, 4.0)
    classifier = Classifier(identity())
    choice = tuning.temperature_by_nll(Map(classifier), [(x, y)])
    chosen = next(row for row in choice.table if row.value == choice.value)
    for predictor in (
        Tempered(Map(classifier), choice.value),
        Map(classifier.tempered(choice.value)),
    ):
        assert metrics.nll(predictor(x), y) == pytest.approx(chosen.nll, rel=1e-12)
    untouched = next(row for row in choice.table if row.value == 1)
    assert untouched.nll == pytest.approx(metrics.nll(Map(classifier)(x), y), rel=1e-12)
    assert chosen.nll == min(row.nll for row in choice.table) < untouched.nll
    assert len({row.accuracy for row in choice.table}) == 1


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (3 * torch.eye(3), torch.arange(3), "every validation example is predicted correctly"),
        (torch.zeros(3, 3), torch.arange(3), "every validation example is predicted correctly"),
        (3 * torch.eye(3), torch.tensor([1, 2, 0]), "labels are no more probable than other"),
        (
            torch.tensor([[0.0, 1.0, -torch.inf]]),
            torch.tensor([0]),
            "log-probabilities are NaN or infinite",
        ),
    ],
)
def test_refuses_data_without_an_optimal_temperature(x, y, message):
    with pytest.raises(ValueError, match=message):
        tuning.temperature_by_nll(Scaled(), [(x, y)])
