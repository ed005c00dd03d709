"""The most cautious value of a grid within a limit, by hand and for powers."""

from __future__ import annotations

import math

import pytest

from studies.engine.choose import most_cautious


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
def test_the_most_cautious_value_by_hand(nlls, value):
    assert most_cautious([1, 10, 100], nlls, 0.2) == value


@pytest.mark.parametrize("limit", [0.11, 0.15, 0.3, 0.39])
def test_log_nll_is_interpolated_linearly_in_the_logarithm(limit):
    """For an NLL that is a power of the value, the interpolation is exact."""
    values = [1.0, 4.0, 9.0]
    found = most_cautious(values, [0.4 * v**-0.7 for v in values], limit)
    assert found == pytest.approx((0.4 / limit) ** (1 / 0.7), rel=5e-4)


def test_rounding_does_not_leave_the_interval():
    values = [1.00004, 1.00001]
    assert min(values) <= most_cautious(values, [0.4, 0.1], 0.2) <= max(values)
