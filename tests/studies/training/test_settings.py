"""Schedules and presets are those of SWAG, and wrong settings are refused."""

from __future__ import annotations

import pytest

from studies.cifar10_c.recipes import RECIPES
from studies.training import Descent

from .written_out import swag_rate


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_the_schedule_is_that_of_swag(recipe):
    t = recipe.training
    expected = [
        swag_rate(epoch, t.swa_start, t.learning_rate, t.swa_learning_rate)
        for epoch in range(t.epochs)
    ]
    assert [t.rate(epoch) for epoch in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    plain_sgd = t.without_averaging()
    expected = [
        swag_rate(epoch, t.epochs, t.learning_rate, 0.01 * t.learning_rate)
        for epoch in range(t.epochs)
    ]
    assert [plain_sgd.rate(e) for e in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    assert plain_sgd.collected == 0


def test_the_cosine_falls_from_the_rate_to_zero():
    t = Descent(epochs=4, learning_rate=0.3)
    rates = [t.rate(step / 2) for step in range(9)]
    assert rates[0] == pytest.approx(0.3)
    assert rates[4] == pytest.approx(0.15)
    assert rates[8] == pytest.approx(0, abs=1e-12)
    assert rates == sorted(rates, reverse=True)
    assert t.swa_start == t.epochs  # nothing is collected
