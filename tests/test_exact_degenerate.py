"""Exact CNML with degenerate features: constant, all zero, rescaled or duplicated."""

from __future__ import annotations

import pytest
import torch

from acnml.exact import LogisticProblem, cnml, with_intercept
from logistic import make_problem, normal


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
