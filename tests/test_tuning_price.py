"""The largest value within a price, compared with hand computation and the exact root."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from acnml import Acnml, Map
from acnml.predictors import Predictor
from acnml.solve import UnsolvedError
from acnml.tuning import within_price
from tunable import FOUR, FakeSolver, Scaled, fake_acnml

REFERENCE = 0.8  # factor of the logits


def flatter(value: float) -> Scaled:
    """The larger the value, the more cautious; the temperature is 1 + value."""
    return Scaled(REFERENCE / (1 + value))


def nll_at(factor: float) -> float:
    """The NLL of `Scaled(factor)` on `FOUR`: 3 of 4 labels have the logit 2 · factor."""
    return math.log(math.exp(2 * factor) + 2) - 0.75 * 2 * factor


def root(limit: float) -> float:
    """The factor with this NLL below the optimum, by bisection."""
    low, high = 0.0, math.log(6) / 2  # p = 3/4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if nll_at(middle) <= limit else (middle, high)
    return high


@pytest.mark.parametrize("start", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("price", [0.001, 0.01, 0.05, 0.1])
def test_finds_the_value_that_costs_the_price(price, start):
    """The chosen value is within the limit, and close to the exact root."""
    choice = within_price(flatter, FOUR, price, Scaled(REFERENCE), start)
    cost = nll_at(REFERENCE / (1 + choice.value)) - nll_at(REFERENCE)
    assert 0.99 * price <= cost <= price + 1e-9
    assert choice.value == pytest.approx(REFERENCE / root(nll_at(REFERENCE) + price) - 1, rel=0.01)


def test_the_table_holds_every_value_that_was_tried():
    tried = []

    def make(value):
        tried.append(value)
        return flatter(value)

    choice = within_price(make, FOUR, 0.05, Scaled(REFERENCE))
    assert [row.value for row in choice.table] == sorted(tried)
    assert 1.0 in tried
    assert choice.value in tried
    assert len(tried) < 15
    for row in choice.table:
        assert row.nll == pytest.approx(nll_at(REFERENCE / (1 + row.value)), rel=1e-12)
    assert f"within 0.05 nats of the reference NLL {nll_at(REFERENCE):.4f}" in choice.rule
    assert "→" in str(choice)


def test_a_value_that_meets_the_price_exactly_is_within_it():
    price = nll_at(0.4) - nll_at(REFERENCE)
    choice = within_price(flatter, FOUR, price, Scaled(REFERENCE), start=1.0)
    assert choice.value == 1
    assert len(choice.table) == 1


@dataclass(frozen=True)
class Late(Predictor):
    """Right with probability 0.9 up to 3, and ½ above."""

    value: float

    def __call__(self, x: Tensor) -> Tensor:
        right = 0.9 if self.value <= 3 else 0.5
        return torch.tensor([[right, 1 - right]]).double().log()


def test_an_nll_that_jumps_is_followed_to_the_jump():
    choice = within_price(Late, [(torch.zeros(1, 1), torch.tensor([0]))], 0.05, Late(1.0))
    assert 3 / (1 + 1e-4) <= choice.value <= 3
    assert len(choice.table) < 30


def test_says_so_if_no_value_is_within_the_price():
    with pytest.raises(ValueError, match=r"no value is within 0\.01 nats") as refused:
        within_price(lambda v: Scaled(0.1), FOUR, 0.01, Scaled(REFERENCE))
    assert "raise the price" in str(refused.value)
    assert "accuracy" in str(refused.value).splitlines()[1]


def test_says_so_if_every_value_is_within_the_price():
    with pytest.raises(ValueError, match=r"every value is within 5 nats .* lower the price"):
        within_price(flatter, FOUR, 5.0, Scaled(REFERENCE))


@pytest.mark.parametrize("price", [-0.1, math.nan, math.inf])
def test_the_price_is_a_number_of_nats(price):
    with pytest.raises(ValueError, match="price must be finite and not negative"):
        within_price(flatter, FOUR, price, Scaled(REFERENCE))


def stops_above(limit: float) -> Acnml:
    """ACNML with a solver that has no solution for an α above a limit."""

    class Stops(FakeSolver):
        def __call__(self, classifier, posterior, x):
            if posterior.var["weight"][0, 0] > limit:
                raise UnsolvedError("too cautious")
            return super().__call__(classifier, posterior, x)

    return replace(fake_acnml(), solver=Stops())


def test_values_without_a_solution_are_passed_over():
    predictor = stops_above(0.5)
    choice = within_price(
        lambda alpha: replace(predictor, alpha=alpha), FOUR, 9.0, Map(predictor.at_mean)
    )
    assert 0.5 / (1 + 1e-4) <= choice.value <= 0.5
    assert all(row.value <= 0.5 for row in choice.table)


def test_says_so_if_no_value_has_a_solution():
    predictor = stops_above(0.0)
    with pytest.raises(ValueError, match="found no solution for any value"):
        within_price(
            lambda alpha: replace(predictor, alpha=alpha), FOUR, 9.0, Map(predictor.at_mean)
        )
