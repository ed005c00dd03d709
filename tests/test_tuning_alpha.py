"""Choosing α: hand-computed tables, and likelihoods generated with a known α."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from acnml import Acnml, Classifier, Linearised, metrics, tuning
from acnml.solve import UnsolvedError
from acnml.tuning import Tolerance
from cases import MODELS, POSTERIORS
from tunable import FOUR, FakeSolver, fake_acnml

GRID = (0.25, 0.5, 1.0, 1.5, 2.0)


def nll_at(logit: float) -> float:
    return math.log(math.exp(logit) + 2) - 0.75 * logit


def nll_flipped() -> float:
    """Only the second point is right after the flip, and the last, whose logit moves to 0."""
    return math.log(math.exp(2) + 2) - 0.5 * 2


def test_the_largest_harmless_alpha_of_a_hand_computed_table():
    tolerance = Tolerance(accuracy=0.1, nll=nll_at(2 / 1.5) - nll_at(2))
    choice = tuning.largest_harmless_alpha(fake_acnml(), FOUR, GRID, tolerance)
    assert choice.value == 0.5
    assert [row.value for row in choice.table] == [0, 0.25, 0.5, 1, 1.5, 2]
    assert [row.accuracy for row in choice.table] == [0.75, 0.75, 0.75, 0.75, 0.5, 0.5]
    nlls = [nll_at(2 / (1 + alpha)) for alpha in (0, 0.25, 0.5, 1)] + 2 * [nll_flipped()]
    assert [row.nll for row in choice.table] == pytest.approx(nlls, rel=1e-12)
    assert [row.harmless for row in choice.table] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("tolerance", "expected"),
    [
        (Tolerance(accuracy=1.0, nll=10.0), 2.0),
        (Tolerance(accuracy=0.25, nll=10.0), 2.0),  # met exactly
        (Tolerance(accuracy=0.24, nll=10.0), 1.0),
        (Tolerance(accuracy=1.0, nll=nll_at(1) - nll_at(2)), 1.0),  # met exactly
    ],
)
def test_both_tolerances_count(tolerance, expected):
    choice = tuning.largest_harmless_alpha(fake_acnml(), FOUR, GRID, tolerance)
    assert choice.value == expected


class Stops(FakeSolver):
    """A solver without a solution for α ≥ 1."""

    def __call__(self, classifier, posterior, x):
        if posterior.var["weight"][0, 0] >= 1:
            raise UnsolvedError("too cautious")
        return super().__call__(classifier, posterior, x)


def test_the_alpha_of_least_nll_is_one_with_a_solution():
    predictor = replace(fake_acnml(), solver=Stops())
    choice = tuning.alpha_by_nll(predictor, FOUR, GRID)
    assert choice.table == tuning.alpha_by_nll(fake_acnml(), FOUR, GRID).table[:3]
    assert choice.value in (0.25, 0.5)
    with pytest.raises(UnsolvedError, match="too cautious"):
        tuning.alpha_by_nll(predictor, FOUR, [1.0, 2.0])


def test_alphas_without_a_solution_are_not_harmless():
    predictor = replace(fake_acnml(), solver=Stops())
    choice = tuning.largest_harmless_alpha(predictor, FOUR, GRID, Tolerance(1.0, 10.0))
    assert choice.value == 0.5
    assert [row.value for row in choice.table] == [0, 0.25, 0.5]


def test_says_so_if_no_alpha_is_harmless():
    with pytest.raises(ValueError, match=r"^no alpha in the grid loses at most") as refused:
        tuning.largest_harmless_alpha(fake_acnml(), FOUR, [1.5, 2.0])
    message = str(refused.value)
    assert "0.005 of MAP's accuracy 0.7500 and adds at most 0.05 nats to MAP's NLL" in message
    assert "use smaller alphas, a larger tolerance" in message
    assert message.count("no") >= 2  # the table is there
    assert "harmless" in message.splitlines()[1]


def test_alpha_by_nll_is_the_minimum_of_the_table():
    choice = tuning.alpha_by_nll(fake_acnml(), FOUR, [2.0, 1.0, 0.1, 0.25])
    assert choice.value == 0.1  # the best of all is 2 / log 6 - 1 = 0.116
    assert [row.value for row in choice.table] == [0, 0.1, 0.25, 1, 2]
    assert choice.table[0].nll == pytest.approx(nll_at(2), rel=1e-12)


def test_alphas_are_tried_on_the_predictor_that_was_given():
    case = MODELS[1]
    solver = Linearised("network", polish=60)
    predictor = Acnml(Classifier(case.model()), POSTERIORS["low_rank"](case.model()), solver)
    x, y = case.x(6), torch.arange(6) % 3
    for row in tuning.alpha_by_nll(predictor, [(x, y)]).table[1:]:
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
