"""Exact CNML reports non-convergence and rejects invalid problems."""

from __future__ import annotations

import math

import pytest
import torch

from acnml.exact import LogisticProblem, cnml, with_intercept
from logistic import make_problem, normal


def test_non_convergence_is_reported(monkeypatch):
    monkeypatch.setattr("acnml.exact.newton.STEPS", 2)
    refits = cnml(make_problem(60, 2, 2, 0.01), with_intercept(9 * normal(2, 5, 2)))
    assert not refits.converged.all()
    assert (refits.residual[~refits.converged] > 1e-8).all()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"features": torch.zeros(3)}, "floating point matrix"),
        ({"features": torch.zeros(0, 2), "labels": torch.zeros(0).long()}, "at least one"),
        ({"features": torch.zeros(3, 2, dtype=torch.long)}, "floating point"),
        ({"features": torch.full((3, 2), torch.nan)}, "features are NaN or infinite"),
        ({"labels": torch.zeros(3)}, "integers"),
        ({"labels": torch.zeros(2, dtype=torch.long)}, r"shape \(3,\)"),
        ({"labels": torch.tensor([0, 1, 2])}, "between 0 and 1, got values from 0 to 2"),
        ({"labels": torch.tensor([0, -1, 1])}, "between 0 and 1"),
        ({"l2": -1.0}, "not negative"),
        ({"l2": math.inf}, "finite"),
        ({"l2": torch.ones(3)}, "each of the 2 features"),
        ({"classes": 1}, "classes must be at least 2"),
    ],
)
def test_wrong_problems_are_refused(changes, match):
    good = {"features": torch.zeros(3, 2), "labels": torch.tensor([0, 1, 1])}
    with pytest.raises(ValueError, match=match):
        LogisticProblem(**{**good, **changes})


def test_queries_that_do_not_fit_are_refused():
    problem = make_problem(40, 2, 2, 0.1)
    with pytest.raises(ValueError, match="was an intercept left out"):
        cnml(problem, normal(0, 3, 2))
    with pytest.raises(ValueError, match="queries are NaN"):
        cnml(problem, torch.full((1, 3), torch.nan))
