"""Exact CNML without a finite maximum, compared with linear programming."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.special import softmax

from acnml.exact import LogisticProblem, cnml, with_intercept
from logistic import grid_problem, make_problem, normal, refit_by_scipy


def escaping(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which points have a positive margin along a direction that lowers no point's margin.

    A linear programme: maximise Σ s_i with s_i ≤ (2y_i - 1) w·x_i and 0 ≤ s_i ≤ 1. Directions add
    up, so one solution has s_i = 1 for every point that can escape.
    """
    n, d = features.shape
    signed = features * (2 * labels[:, None] - 1)
    result = linprog(
        np.concatenate([np.zeros(d), -np.ones(n)]),
        A_ub=np.hstack([-signed, np.eye(n)]),
        b_ub=np.zeros(n),
        bounds=[(None, None)] * d + [(0, 1)] * n,
    )
    assert result.status == 0
    return result.x[d:] > 0.5


def limit_by_linear_programming(problem: LogisticProblem, query: np.ndarray, label: int) -> float:
    """p_θ̂_y(y|x) in the limit: 1 if the query escapes, else fitted to the remaining points."""
    features = np.vstack([problem.features.numpy(), query])
    labels = np.append(problem.labels.numpy(), label)
    gone = escaping(features, labels)
    if gone[-1]:
        return 1.0
    stay = ~gone
    weights = refit_by_scipy(features[stay], labels[stay], np.zeros(features.shape[1]), 2)
    return float(softmax(weights @ query)[label])


def with_indicator(seed: int) -> LogisticProblem:
    """Overlapping classes, and a binary feature that is 1 for some points of class 1 only."""
    problem = make_problem(30, 1, 2, 0.0)
    rare = ((torch.arange(30) % 5 == seed) & (problem.labels == 1)).double()
    return LogisticProblem(torch.cat([problem.features, rare[:, None]], 1), problem.labels, 0.0)


SEPARATED = {
    "a gap": grid_problem([0, 0, 0, 1, 1, 1]),
    "touching in one point": LogisticProblem(
        with_intercept(torch.tensor([0.0, 1.0, 2.0, 2.0, 3.0, 4.0]).double().unsqueeze(-1)),
        torch.tensor([0, 0, 0, 1, 1, 1]),
    ),
    "one class": grid_problem([1, 1, 1, 1]),
    "an indicator": with_indicator(2),
    "two dimensions": LogisticProblem(
        with_intercept(normal(0, 25, 2)), (normal(0, 25, 2) @ torch.ones(2).double() > 0.3).long()
    ),
    "more features than points": LogisticProblem(normal(0, 4, 9), torch.tensor([0, 1, 1, 0])),
    "one point": LogisticProblem(torch.ones(1, 1), torch.tensor([1])),
}


@pytest.mark.parametrize("name", SEPARATED)
def test_limits_agree_with_linear_programming(name):
    problem = SEPARATED[name]
    d = problem.features.shape[1]
    queries = torch.cat([problem.features[:3], problem.features[-3:], normal(8, 6, d)])
    queries = torch.cat([queries, problem.features.mean(0, keepdim=True), torch.zeros(1, d)])
    refits = cnml(problem, queries)
    assert refits.converged.all()
    for q, label in itertools.product(range(len(queries)), range(2)):
        query = queries[q].numpy()
        features = np.vstack([problem.features.numpy(), query])
        gone = escaping(features, np.append(problem.labels.numpy(), label))
        assert refits.limit[q, label] == gone.any(), (q, label)
        expected = limit_by_linear_programming(problem, query, label)
        assert refits.log_lik[q, label].exp().item() == pytest.approx(expected, abs=1e-6)
    assert refits.limit.any()


@pytest.mark.parametrize("seed", range(12))
def test_limits_agree_with_linear_programming_where_points_often_touch(seed):
    """With small integers, half of these problems are separable, and half of those only partly."""
    generator = torch.Generator().manual_seed(seed)
    n, d = 3 + seed % 7, 1 + seed % 3
    features = with_intercept(torch.randint(0, 3, (n, d), generator=generator).double())
    labels = torch.randint(0, 2, (n,), generator=generator)
    query = with_intercept(torch.randint(-1, 4, (1, d), generator=generator).double())
    problem = LogisticProblem(features, labels)
    refits = cnml(problem, query)
    assert refits.converged.all()
    for label in range(2):
        gone = escaping(np.vstack([features, query]), np.append(labels.numpy(), label))
        assert refits.limit[0, label] == gone.any()
        expected = limit_by_linear_programming(problem, query[0].numpy(), label)
        assert refits.log_lik[0, label].exp().item() == pytest.approx(expected, abs=1e-6)


def test_three_classes_without_a_maximum():
    """One class is separable and the others overlap, so they alone determine the limit."""
    pair = make_problem(40, 1, 2, 0.0)
    far = torch.tensor([[500.0, 1.0], [501.0, 1.0]], dtype=torch.float64)
    # The far class has a feature of its own, so that it can leave without disturbing the pair.
    lone = torch.cat([torch.zeros(40), torch.ones(2)]).double().unsqueeze(-1)
    features = torch.cat([torch.cat([pair.features, far]), lone], 1)
    labels = torch.cat([pair.labels, torch.tensor([2, 2])])
    query = torch.tensor([[0.3, 1.0]], dtype=torch.float64)
    refits = cnml(
        LogisticProblem(features, labels, 0.0, 3), torch.cat([query, torch.zeros(1, 1)], 1)
    )
    assert refits.limit[0, :2].all()
    assert refits.converged[0, :2].all()
    torch.testing.assert_close(
        refits.log_lik[0, :2], cnml(pair, query).log_lik[0], rtol=0, atol=1e-6
    )
