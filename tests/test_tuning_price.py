"""The most cautious value within a price, compared with hand computation and the exact root."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from acnml import Acnml, metrics
from acnml.predictors import Predictor
from acnml.solve import UnsolvedError
from acnml.tuning import most_cautious, within_price
from tunable import FOUR, FakeSolver, Scaled, fake_acnml

GRID = [0.1, 0.2, 0.4, 0.8]  # factors of the logits: the smaller, the more cautious


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


class TestMostCautious:
    @pytest.mark.parametrize(
        ("nlls", "value"),
        [
            ([0.1, 0.1, 0.1], 1.0),  # the first is within the limit
            ([0.2, 0.3, 0.3], 1.0),
            ([0.4, 0.2, 0.1], 10.0),  # one meets the limit exactly
            ([0.4, 0.1, 0.1], 3.162),  # 0.4 and 0.1 are equally far from 0.2 in logarithms
            ([0.9, 0.4, 0.1], 31.62),
            ([0.4, 0.1, 0.9], 3.162),  # overconfident at the end
            ([math.inf, 0.1, 0.1], 10.0),
            ([0.4, 0.0, 0.1], 10.0),
        ],
    )
    def test_by_hand(self, nlls, value):
        assert most_cautious([1, 10, 100], nlls, 0.2) == value

    @pytest.mark.parametrize("limit", [0.11, 0.15, 0.3, 0.39])
    def test_log_nll_is_interpolated_linearly_in_the_logarithm(self, limit):
        """For an NLL that is a power of the value, the interpolation is exact."""
        values = [1.0, 4.0, 9.0]
        found = most_cautious(values, [0.4 * v**-0.7 for v in values], limit)
        assert found == pytest.approx((0.4 / limit) ** (1 / 0.7), rel=5e-4)

    def test_rounding_does_not_leave_the_interval(self):
        values = [1.00004, 1.00001]
        assert min(values) <= most_cautious(values, [0.4, 0.1], 0.2) <= max(values)


class TestWithinPrice:
    @pytest.mark.parametrize("price", [0.001, 0.01, 0.05, 0.1])
    def test_finds_the_value_that_costs_the_price(self, price):
        """The chosen value is within the limit, and close to the exact root."""
        reference = nll_at(0.8)
        choice = within_price(Scaled, GRID, FOUR, price, reference)
        assert nll_at(choice.value) <= reference + price + 1e-9
        assert nll_at(choice.value) >= reference + 0.8 * price
        assert choice.value == pytest.approx(root(reference + price), rel=0.01)
        neighbour = max(value for value in GRID if value <= choice.value)
        assert nll_at(neighbour) > reference + price  # so the grid alone would have chosen another

    def test_the_table_holds_every_value_that_was_tried(self):
        choice = within_price(Scaled, GRID, FOUR, 0.05, nll_at(0.8))
        values = [row.value for row in choice.table]
        assert values == sorted(values)
        assert {*GRID, choice.value} <= set(values)
        assert len(values) <= len(GRID) + 6
        for row in choice.table:
            assert row.nll == pytest.approx(nll_at(row.value), rel=1e-12)
        assert f"within 0.05 nats of the reference NLL {nll_at(0.8):.4f}" in choice.rule
        assert "→" in str(choice)

    def test_a_predictor_as_reference_is_its_nll(self):
        by_predictor = within_price(Scaled, GRID, FOUR, 0.02, Scaled(0.8))
        assert by_predictor == within_price(Scaled, GRID, FOUR, 0.02, by_nll := nll_of(0.8))
        assert by_nll == pytest.approx(nll_at(0.8), rel=1e-12)

    def test_a_value_that_meets_the_price_exactly_is_within_it(self):
        price = nll_of(0.4) - nll_of(0.8)
        choice = within_price(Scaled, [0.2, 0.4, 0.8], FOUR, price, nll_of(0.8))
        assert choice.value == pytest.approx(0.4, rel=1e-3)
        assert choice.value <= 0.4

    def test_says_if_the_grid_ends_before_the_price_is_spent(self):
        choice = within_price(Scaled, [0.4, 0.8], FOUR, 5.0, nll_at(0.8))
        assert choice.value == 0.4
        assert choice.rule.endswith("the most cautious one in the grid: try more cautious ones")
        assert [row.value for row in choice.table] == [0.4, 0.8]

    def test_interpolated_values_are_tried_until_one_is_within_the_price(self):
        """An NLL that falls late: interpolation is too optimistic at first."""
        tried = []

        @dataclass(frozen=True)
        class Late(Predictor):
            """Right with probability ½ below 3, more above."""

            value: float

            def __call__(self, x: Tensor) -> Tensor:
                tried.append(self.value)
                right = 0.5 if self.value < 3 else 0.9
                return torch.tensor([[right, 1 - right]]).double().log()

        data = [(torch.zeros(1, 1), torch.tensor([0]))]
        limit = -math.log(0.9) + 0.05
        choice = within_price(Late, [1.0, 10.0], data, 0.05, -math.log(0.9))
        assert tried[:2] == [10.0, 1.0]
        assert len(tried) <= 8
        row = next(row for row in choice.table if row.value == choice.value)
        assert row.nll <= limit
        assert [r.value for r in choice.table] == sorted(tried)

    def test_says_so_if_no_value_is_within_the_price(self):
        with pytest.raises(
            ValueError, match=r"no value in the grid is within 0\.01 nats"
        ) as refused:
            within_price(Scaled, [0.1, 0.2], FOUR, 0.01, nll_at(0.8))
        assert "use less cautious values or a higher price" in str(refused.value)
        assert "accuracy" in str(refused.value).splitlines()[1]

    def test_values_without_a_solution_are_passed_over(self):
        class Stops(FakeSolver):
            def __call__(self, classifier, posterior, x):
                if posterior.var["weight"][0, 0] > 0.5:
                    raise UnsolvedError("too cautious")
                return super().__call__(classifier, posterior, x)

        predictor = replace(fake_acnml(), solver=Stops())

        def by_alpha(alpha: float) -> Acnml:
            return replace(predictor, alpha=alpha)

        choice = within_price(by_alpha, [1.0, 0.5, 0.25], FOUR, 9.0, 1.0)
        assert choice.value == 0.5
        assert [row.value for row in choice.table] == [0.25, 0.5]
        assert choice.rule.endswith("for which the solver finds a solution")
        with pytest.raises(UnsolvedError, match="too cautious"):
            within_price(by_alpha, [2.0, 1.0], FOUR, 9.0, 1.0)


def nll_of(factor: float) -> float:
    return metrics.nll(Scaled(factor)(FOUR[0][0]), FOUR[0][1])
