"""Choosing α: hand-computed tables, and likelihoods generated with a known α."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from acnml import Acnml, Classifier, Linearised, metrics, tuning
from acnml.solve import UnsolvedError
from cases import MODELS, POSTERIORS
from tunable import FOUR, FakeSolver, fake_acnml

GRID = (0.25, 0.5, 1.0, 1.5, 2.0)


def nll_at(logit: float) -> float:
    return math.log(math.exp(logit) + 2) - 0.75 * logit


def nll_flipped() -> float:
    """Only the second point is right after the flip, and the last, whose logit moves to 0."""
    return math.log(math.exp(2) + 2) - 0.5 * 2


def test_the_largest_harmless_alpha_of_a_hand_computed_table():
    allowed = nll_at(2 / 1.5) - nll_at(2)
    choice = tuning.largest_harmless_alpha(fake_acnml(), FOUR, GRID, accuracy=0.1, nll=allowed)
    assert choice.value == 0.5
    assert [row.value for row in choice.table] == [0, 0.25, 0.5, 1, 1.5, 2]
    assert [row.accuracy for row in choice.table] == [0.75, 0.75, 0.75, 0.75, 0.5, 0.5]
    nlls = [nll_at(2 / (1 + alpha)) for alpha in (0, 0.25, 0.5, 1)] + 2 * [nll_flipped()]
    assert [row.nll for row in choice.table] == pytest.approx(nlls, rel=1e-12)


@pytest.mark.parametrize(
    ("accuracy", "nll", "expected"),
    [
        (1.0, 10.0, 2.0),
        (0.25, 10.0, 2.0),  # met exactly
        (0.24, 10.0, 1.0),
        (1.0, nll_at(1) - nll_at(2), 1.0),  # met exactly
    ],
)
def test_both_limits_count(accuracy, nll, expected):
    choice = tuning.largest_harmless_alpha(fake_acnml(), FOUR, GRID, accuracy, nll)
    assert choice.value == expected


class Stops(FakeSolver):
    """A solver without a solution for α ≥ 1."""

    def __call__(self, classifier, posterior, x):
        if posterior.var["weight"][0, 0] >= 1:
            raise UnsolvedError("too cautious")
        return super().__call__(classifier, posterior, x)


def test_alphas_without_a_solution_are_not_harmless():
    predictor = replace(fake_acnml(), solver=Stops())
    choice = tuning.largest_harmless_alpha(predictor, FOUR, GRID, 1.0, 10.0)
    assert choice.value == 0.5
    assert [row.value for row in choice.table] == [0, 0.25, 0.5]
    with pytest.raises(UnsolvedError, match="too cautious"):
        tuning.largest_harmless_alpha(predictor, FOUR, [1.0, 2.0])


def test_says_so_if_no_alpha_is_harmless():
    with pytest.raises(ValueError, match=r"^no alpha in the grid loses at most") as refused:
        tuning.largest_harmless_alpha(fake_acnml(), FOUR, [1.5, 2.0])
    message = str(refused.value)
    assert "0.005 of MAP's accuracy 0.7500 and adds at most 0.05 nats to MAP's NLL" in message
    assert "use smaller alphas, larger limits" in message
    assert "accuracy" in message.splitlines()[1]  # the table is there


def test_the_alpha_of_least_nll_is_the_minimum_of_the_table():
    predictor = fake_acnml()
    choice = tuning.least_nll(lambda a: replace(predictor, alpha=a), [2.0, 1.0, 0.1, 0.25], FOUR)
    assert choice.value == 0.1  # the best of all is 2 / log 6 - 1 = 0.116
    assert [row.value for row in choice.table] == [2, 1, 0.1, 0.25]
    assert choice.table[1].nll == pytest.approx(nll_at(1), rel=1e-12)


def test_alphas_are_tried_on_the_predictor_that_was_given():
    case = MODELS[1]
    solver = Linearised("network", polish=60)
    predictor = Acnml(Classifier(case.model()), POSTERIORS["low_rank"](case.model()), solver)
    x, y = case.x(6), torch.arange(6) % 3
    for row in tuning.largest_harmless_alpha(predictor, [(x, y)], nll=9.0).table[1:]:
        log_probs = Acnml(predictor.classifier, predictor.posterior, predictor.solver, row.value)(x)
        assert row.nll == metrics.nll(log_probs, y)


@pytest.mark.parametrize("alpha", tuning.ALPHAS)
def test_matching_finds_the_alpha_that_the_likelihoods_were_made_with(alpha):
    case = MODELS[1]
    classifier, posterior = Classifier(case.model()), POSTERIORS["diagonal"](case.model())
    likelihoods = Acnml(classifier, posterior, alpha=alpha).solve(case.x(4)).log_lik
    choice = tuning.alpha_matching_cnml(Acnml(classifier, posterior), case.x(4), likelihoods)
    assert choice.value == alpha
    for row in choice.table:
        assert (row.distance == 0) == (row.value == alpha)
        assert math.copysign(row.distance, row.value - alpha) == pytest.approx(row.excess)
