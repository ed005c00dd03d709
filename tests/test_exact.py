"""Exact CNML and CNMAP against independent optimisers, and where there is no maximum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import acnml
from acnml.exact import LogisticProblem, cnml, fit, laplace, with_intercept


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_problem(n: int, d: int, classes: int, l2: float | Tensor) -> LogisticProblem:
    """A sample of a logistic model with an intercept, in which every class occurs."""
    features = with_intercept(normal(n + d, n, d))
    logits = features @ normal(classes, classes, d + 1).mT
    generator = torch.Generator().manual_seed(n)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    labels[:classes] = torch.arange(classes)
    return LogisticProblem(features, labels, l2, classes)


# Independent optimisers ------------------------------------------------------------------------


def refit_by_scipy(features, labels, penalty, classes, held=None) -> np.ndarray:
    """One weight vector per class, class 0 held at zero where there are two; by trust regions."""
    held = held if held is not None else 1 if classes == 2 else 0
    d = features.shape[1]
    hot = np.eye(classes)[labels]

    def unpack(vector):
        return np.concatenate([np.zeros((held, d)), vector.reshape(-1, d)])

    def loss(vector):
        weights = unpack(vector)
        return -(log_softmax(features @ weights.T, 1) * hot).sum() + (penalty * weights**2).sum()

    def gradient(vector):
        weights = unpack(vector)
        p = softmax(features @ weights.T, 1)
        return ((p - hot).T @ features + 2 * penalty * weights)[held:].ravel()

    def hessian(vector):
        p = softmax(features @ unpack(vector).T, 1)
        middle = np.einsum("nk,kl->nkl", p, np.eye(classes)) - np.einsum("nk,nl->nkl", p, p)
        whole = np.einsum("nkl,ni,nj->kilj", middle, features, features)
        whole += 2 * np.einsum("kl,i,ij->kilj", np.eye(classes), penalty, np.eye(d))
        size = (classes - held) * d
        return whole[held:, :, held:].reshape(size, size)

    start = np.zeros((classes - held) * d)
    options = {"gtol": 1e-10, "maxiter": 500}
    found = minimize(loss, start, jac=gradient, hess=hessian, method="trust-exact", options=options)
    assert np.abs(gradient(found.x)).max() < 1e-6
    return unpack(found.x)


def refits_by_scipy(problem: LogisticProblem, queries: Tensor) -> Tensor:
    """log p_θ̂_y(y|x) with the query simply appended to the data."""
    rows = []
    for query, label in itertools.product(queries.numpy(), range(problem.classes)):
        features = np.vstack([problem.features.numpy(), query])
        labels = np.append(problem.labels.numpy(), label)
        weights = refit_by_scipy(features, labels, problem.penalty.numpy(), problem.classes)
        rows.append(log_softmax(weights @ query)[label])
    return torch.tensor(rows, dtype=torch.float64).view(-1, problem.classes)


UNPENALISED_INTERCEPT = torch.tensor([0.5, 0.5, 0.0])
GRID = [
    (n, d, classes, l2)
    for (n, d), classes, l2 in itertools.product(
        [(40, 1), (60, 2), (150, 4)], [2, 3, 5], [0.0, 0.1, 1.0, 10.0]
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
    model = LogisticRegression(C=1 / (2 * l2), fit_intercept=False, tol=1e-10, max_iter=10_000)
    expected = model.fit(x, y).predict_log_proba(x)
    found = fit(problem)
    torch.testing.assert_close(
        found.log_probs(problem.features), torch.tensor(expected), rtol=0, atol=1e-6
    )
    shown = found.weights[1:] if classes == 2 else found.weights
    torch.testing.assert_close(shown, torch.tensor(model.coef_), rtol=0, atol=1e-5)
    own = found.log_probs(problem.features)[torch.arange(80), problem.labels]
    torch.testing.assert_close(found.log_lik, own.sum())


@pytest.mark.parametrize("classes", [2, 3])
def test_refits_are_stationary(classes):
    """Autograd's gradient of the penalised likelihood vanishes at the reported weights."""
    problem = make_problem(50, 2, classes, 0.3)
    query = with_intercept(3 * normal(5, 1, 2))
    refits = cnml(problem, query)
    for label in range(classes):
        weights = refits.weights[0, label].clone().requires_grad_()
        features = torch.cat([problem.features, query])
        labels = torch.cat([problem.labels, torch.tensor([label])])
        loss = torch.nn.functional.cross_entropy(features @ weights.mT, labels, reduction="sum")
        (loss + 0.3 * weights.square().sum()).backward()
        held = 1 if classes == 2 else 0
        assert weights.grad[held:].abs().max() < 1e-10


# Properties ------------------------------------------------------------------------------------


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


def test_a_penalty_on_everything_tends_to_uniform():
    problem = make_problem(50, 2, 3, 1e12)
    log_probs = cnml(problem, with_intercept(5 * normal(1, 4, 2))).log_probs
    torch.testing.assert_close(log_probs.exp(), torch.full((4, 3), 1 / 3).double())


def test_cnmap_is_less_conservative_as_the_penalty_grows():
    features, labels = normal(0, 40, 2), torch.arange(40) % 2
    features = with_intercept(features + 2 * (2 * labels - 1).unsqueeze(-1))
    far = with_intercept(8 * torch.nn.functional.normalize(normal(1, 30, 2)))
    regrets = [
        cnml(LogisticProblem(features, labels, l2), far).regret.mean().item()
        for l2 in (0.0, 0.1, 1.0, 10.0)
    ]
    assert regrets == sorted(regrets, reverse=True)


def test_two_classes_with_a_vector_each_are_one_vector_with_half_the_penalty():
    problem = make_problem(60, 2, 2, 0.5)
    features = problem.features.numpy()
    two = refit_by_scipy(features, problem.labels.numpy(), np.ones(3), 2, held=0)
    expected = torch.tensor(log_softmax(features @ two.T, 1))
    torch.testing.assert_close(fit(problem).log_probs(problem.features), expected)


@pytest.mark.parametrize("l2", [0.0, 1.0])
def test_labels_permute(l2):
    problem = make_problem(60, 2, 3, l2)
    order = torch.tensor([2, 0, 1])  # new name of every class
    renamed = LogisticProblem(problem.features, order[problem.labels], l2, 3)
    queries = with_intercept(4 * normal(4, 5, 2))
    torch.testing.assert_close(
        cnml(renamed, queries).log_lik[:, order], cnml(problem, queries).log_lik
    )


def test_blocks_and_batches_change_nothing():
    problem = make_problem(40, 2, 3, 0.0)
    queries = with_intercept(4 * normal(4, 7, 2))
    whole = cnml(problem, queries)
    in_blocks = cnml(problem, queries, memory=1)
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


# No finite maximum -----------------------------------------------------------------------------


def escaping(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which points have a positive margin along some direction that lowers nobody's margin.

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
    """p_θ̂_y(y|x) in the limit: 1 where the query escapes, else from the points that stay."""
    features = np.vstack([problem.features.numpy(), query])
    labels = np.append(problem.labels.numpy(), label)
    gone = escaping(features, labels)
    if gone[-1]:
        return 1.0
    stay = ~gone
    weights = refit_by_scipy(features[stay], labels[stay], np.zeros(features.shape[1]), 2)
    return float(softmax(weights @ query)[label])


def grid_problem(labels: list[int]) -> LogisticProblem:
    """Points on a line of whole numbers, with intercept."""
    x = torch.arange(len(labels), dtype=torch.float64).unsqueeze(-1)
    return LogisticProblem(with_intercept(x), torch.tensor(labels), 0.0)


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


@pytest.mark.parametrize("seed", range(20))
def test_limits_agree_with_linear_programming_where_points_often_touch(seed):
    """Small whole numbers: half of these problems are separated, half of those only in part."""
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


def test_a_separable_training_set_is_reported_as_such():
    found = fit(grid_problem([0, 0, 1, 1]))
    assert found.limit
    assert found.converged
    assert found.log_lik == 0


def test_three_classes_without_a_maximum():
    """One class stands apart for ever, the two others overlap: the limit is theirs alone."""
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


def test_an_unpenalised_intercept_alone_can_run_away():
    labels = torch.ones(10, dtype=torch.long)
    penalty = torch.tensor([1.0, 0.0])
    problem = LogisticProblem(with_intercept(normal(0, 10, 1)), labels, penalty)
    refits = cnml(problem, with_intercept(normal(1, 3, 1)))
    assert refits.converged.all()
    assert refits.limit.tolist() == [[False, True]] * 3
    assert (refits.log_lik[:, 1] == 0).all()
    assert (refits.log_lik[:, 0] < -0.5).all()


# Degenerate features ---------------------------------------------------------------------------


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


def test_a_query_that_differs_where_nothing_holds_can_be_anything():
    """A feature that is always 0 in training explains any label of a query that has it."""
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


def test_features_that_are_all_zero_leave_the_uniform_distribution():
    problem = LogisticProblem(torch.zeros(5, 2), torch.tensor([0, 1, 1, 1, 1]), 0.0)
    assert fit(problem).log_lik.item() == pytest.approx(-5 * math.log(2))
    log_lik = cnml(problem, torch.tensor([[0.0, 0.0], [1.0, 0.0]])).log_lik
    torch.testing.assert_close(log_lik.exp(), torch.tensor([[0.5, 0.5], [1.0, 1.0]]).double())


@pytest.mark.parametrize("l2", [0.0, 0.2])
def test_duplicate_points_count_as_often_as_they_occur(l2):
    """m copies of the data with m times the penalty have the same maximum."""
    problem = make_problem(40, 2, 3, l2)
    copies = LogisticProblem(problem.features.repeat(3, 1), problem.labels.repeat(3), 3 * l2, 3)
    torch.testing.assert_close(fit(copies).weights, fit(problem).weights, rtol=0, atol=1e-8)
    queries = copies.features[:3]
    torch.testing.assert_close(
        cnml(copies, queries).log_lik.exp(),
        refits_by_scipy(copies, queries).exp(),
        rtol=0,
        atol=1e-6,
    )


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
        ({"labels": torch.tensor([0, 1, 2])}, "between 0 and 1, got 0 to 2"),
        ({"labels": torch.tensor([0, -1, 1])}, "between 0 and 1"),
        ({"l2": -1.0}, "not negative"),
        ({"l2": math.inf}, "finite"),
        ({"l2": torch.ones(3)}, "each of the 2 features"),
        ({"classes": 1}, "at least 2 classes"),
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


# The Laplace posterior -------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_the_laplace_covariance_is_the_inverse_hessian(classes):
    problem = make_problem(60, 2, classes, 0.3)
    fitted = laplace(problem)
    mean = fitted.posterior.mean["0.weight"]
    codes = dict(fitted.classifier.parameters)["1.weight"]

    def loss(flat):
        logits = problem.features @ (codes @ flat.view_as(mean)).mT
        nll = torch.nn.functional.cross_entropy(logits, problem.labels, reduction="sum")
        return nll + 0.3 * flat.square().sum()

    hessian = torch.autograd.functional.hessian(loss, mean.flatten())
    directions = fitted.posterior.directions["0.weight"].flatten(1)
    torch.testing.assert_close(directions.mT @ directions, torch.linalg.inv(hessian))
    torch.testing.assert_close(
        acnml.Map(fitted.classifier)(problem.features), fit(problem).log_probs(problem.features)
    )


def test_the_laplace_posterior_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    laplace(make_problem(40, 2, 3, 0.3))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_unique_maximum_there_is_no_laplace_posterior():
    with pytest.raises(ValueError, match="l2 > 0"):
        laplace(grid_problem([0, 0, 1, 1]))
    dependent = LogisticProblem(
        with_intercept(make_problem(40, 2, 2, 0.0).features), torch.arange(40) % 2
    )
    with pytest.raises(ValueError, match="l2 > 0"):
        laplace(dependent)
