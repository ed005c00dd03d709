"""Exact CNML and CNMAP against independent optimisers, and their properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from acnml.exact import LogisticProblem, cnml, fit, with_intercept
from logistic import make_problem, normal, refits_by_scipy

UNPENALISED_INTERCEPT = torch.tensor([0.5, 0.5, 0.0])
GRID = [
    (n, d, classes, l2)
    for (n, d), classes, l2 in itertools.product(
        [(40, 1), (60, 2), (150, 4)], [2, 4], [0.0, 0.1, 10.0]
    )
] + [(60, 2, 2, UNPENALISED_INTERCEPT), (60, 2, 3, UNPENALISED_INTERCEPT)]


@pytest.mark.parametrize(("n", "d", "classes", "l2"), GRID)
def test_refits_agree_with_an_independent_optimiser(n, d, classes, l2):
    problem = make_problem(n, d, classes, l2)
    queries = with_intercept(torch.cat([normal(1, 1, d), 6 * normal(2, 2, d)]))
    refits = cnml(problem, queries)
    assert refits.converged.all()
    assert not refits.limit.any()
    torch.testing.assert_close(
        refits.log_lik.exp(), refits_by_scipy(problem, queries).exp(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("l2", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_training_fit_agrees_with_scikit_learn(classes, l2):
    problem = make_problem(80, 3, classes, l2)
    x, y = problem.features.numpy(), problem.labels.numpy()
    # Its penalty is ½‖w‖²/C, ours λ‖w‖².
    settings = {"solver": "newton-cg", "fit_intercept": False, "tol": 1e-10, "max_iter": 10_000}
    model = LogisticRegression(C=1 / (2 * l2), **settings)
    expected = model.fit(x, y).predict_log_proba(x)
    found = fit(problem)
    torch.testing.assert_close(
        found.log_probs(problem.features), torch.tensor(expected), rtol=0, atol=1e-6
    )
    shown = found.weights[1:] if classes == 2 else found.weights
    torch.testing.assert_close(shown, torch.tensor(model.coef_), rtol=0, atol=1e-5)
    own = found.log_probs(problem.features)[torch.arange(80), problem.labels]
    torch.testing.assert_close(found.log_lik, own.sum())


@pytest.mark.parametrize("classes", [2, 4])
def test_the_normaliser_lies_between_1_and_the_number_of_classes(classes):
    problem = make_problem(60, 2, classes, 0.0)
    regret = cnml(problem, with_intercept(10 * normal(3, 200, 2))).regret
    assert (regret >= 0).all()
    assert (regret <= math.log(classes)).all()
    assert regret.max() > 0.5 * math.log(classes)


def test_a_penalty_that_grows_leaves_the_unpenalised_intercept():
    n, ones = 50, 20
    labels = (torch.arange(n) < ones).long()
    penalty = torch.tensor([1e12, 1e12, 0.0])
    problem = LogisticProblem(with_intercept(normal(0, n, 2)), labels, penalty)
    refits = cnml(problem, with_intercept(5 * normal(1, 4, 2)))
    # Only the share of each label is left, and it counts the query.
    shares = torch.tensor([n - ones + 1, ones + 1], dtype=torch.float64) / (n + 1)
    torch.testing.assert_close(refits.log_lik.exp(), shares.expand(4, 2), rtol=0, atol=1e-8)


def test_blocks_and_batches_change_nothing(monkeypatch):
    problem = make_problem(40, 2, 3, 0.0)
    queries = with_intercept(4 * normal(4, 7, 2))
    whole = cnml(problem, queries)
    monkeypatch.setattr("acnml.exact.refit.AT_ONCE", 1)
    in_blocks = cnml(problem, queries)
    one = cnml(problem, queries[3:4])
    torch.testing.assert_close(whole.log_lik, in_blocks.log_lik, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole.weights, in_blocks.weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(whole.log_lik[3:4], one.log_lik, rtol=0, atol=1e-12)


def test_single_precision_data_are_solved_in_double():
    problem = make_problem(40, 2, 2, 0.5)
    single = LogisticProblem(problem.features.float(), problem.labels, 0.5)
    queries = normal(4, 3, 3)
    assert cnml(single, queries.float()).log_lik.dtype == torch.float64
    torch.testing.assert_close(
        cnml(single, queries.float()).log_lik, cnml(problem, queries).log_lik, rtol=0, atol=1e-5
    )


# Degenerate features: constant, all zero, rescaled or duplicated


@pytest.mark.parametrize("l2", [0.0, 0.5])
@pytest.mark.parametrize("classes", [2, 3])
def test_constant_features_beside_an_intercept_change_nothing_without_a_penalty(classes, l2):
    problem = make_problem(50, 2, classes, torch.tensor([l2, l2, 0.0]))
    queries = with_intercept(3 * normal(6, 4, 2))
    twice = LogisticProblem(
        with_intercept(problem.features),
        problem.labels,
        torch.tensor([l2, l2, 0.0, 0.0]),
        classes,
    )
    refits = cnml(twice, with_intercept(queries))
    assert refits.converged.all()
    torch.testing.assert_close(refits.log_lik, cnml(problem, queries).log_lik, rtol=0, atol=1e-9)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_units_of_features_do_not_matter_without_a_penalty(unit):
    problem, queries = make_problem(60, 2, 3, 0.0), with_intercept(4 * normal(3, 5, 2))
    units = torch.tensor([unit, 1.0, 1.0], dtype=torch.float64)
    changed = LogisticProblem(problem.features * units, problem.labels, 0.0, 3)
    torch.testing.assert_close(
        cnml(changed, queries * units).log_lik, cnml(problem, queries).log_lik, rtol=0, atol=1e-11
    )


def test_a_query_outside_the_span_of_the_data_fits_every_label():
    """A feature that is always 0 in training can fit any label of a query where it is not 0."""
    problem = make_problem(50, 2, 3, 0.0)
    silent = LogisticProblem(
        torch.cat([problem.features, torch.zeros(50, 1)], 1), problem.labels, 0.0, 3
    )
    queries = torch.cat([with_intercept(normal(6, 2, 2)), torch.tensor([[1e-3], [0.0]])], 1)
    refits = cnml(silent, queries)
    assert refits.limit.tolist() == [[True] * 3, [False] * 3]
    assert (refits.log_lik[0] == 0).all()
    torch.testing.assert_close(
        refits.log_lik[1:], cnml(problem, queries[1:, :3]).log_lik, rtol=0, atol=1e-9
    )
    assert refits.converged.all()


def test_non_convergence_is_reported(monkeypatch):
    monkeypatch.setattr("acnml.exact.newton.STEPS", 1)
    refits = cnml(make_problem(60, 2, 2, 0.01), with_intercept(9 * normal(2, 5, 2)))
    assert not refits.converged.all()
    assert (refits.residual[~refits.converged] > 1e-8).all()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"features": torch.zeros(3)}, r"features must be \(points, features\)"),
        ({"features": torch.full((3, 2), torch.nan)}, "features are NaN or infinite"),
        ({"labels": torch.zeros(2, dtype=torch.long)}, r"shape \(3,\)"),
        ({"labels": torch.tensor([0, 1, 2])}, "between 0 and 1"),
        ({"l2": -1.0}, "not negative"),
    ],
)
def test_wrong_problems_are_refused(changes, match):
    good = {"features": torch.zeros(3, 2), "labels": torch.tensor([0, 1, 1])}
    with pytest.raises(ValueError, match=match):
        LogisticProblem(**{**good, **changes})


def test_a_query_without_the_intercept_is_refused():
    with pytest.raises(ValueError, match="was an intercept left out"):
        cnml(make_problem(40, 2, 2, 0.1), normal(0, 3, 2))
