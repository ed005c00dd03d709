"""Exact CNML, CNMAP, NML and Laplace against independent optimisers, and their properties."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression

import acnml
from acnml.exact import LogisticProblem, cnml, fit, laplace, nml, with_intercept
from logistic import grid_problem, make_problem, normal, refit_by_scipy, refits_by_scipy

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


# Without a finite maximum, against linear programming -------------------------------------------


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


def touching(seed: int) -> tuple[LogisticProblem, torch.Tensor]:
    """With small integers, half of these are separable, and half of those only partly."""
    generator = torch.Generator().manual_seed(seed)
    n, d = 3 + seed % 7, 1 + seed % 3
    features = with_intercept(torch.randint(0, 3, (n, d), generator=generator).double())
    labels = torch.randint(0, 2, (n,), generator=generator)
    query = with_intercept(torch.randint(-1, 4, (1, d), generator=generator).double())
    return LogisticProblem(features, labels), query


@pytest.mark.parametrize("case", [*SEPARATED, *range(12)])
def test_limits_agree_with_linear_programming(case):
    if isinstance(case, int):
        problem, queries = touching(case)
    else:
        problem = SEPARATED[case]
        x, d = problem.features, problem.features.shape[1]
        some = x[:3], x[-3:], normal(8, 6, d), x.mean(0, keepdim=True), torch.zeros(1, d)
        queries = torch.cat(some)
    refits = cnml(problem, queries)
    assert refits.converged.all()
    for q, label in itertools.product(range(len(queries)), range(2)):
        query = queries[q].numpy()
        features = np.vstack([problem.features.numpy(), query])
        gone = escaping(features, np.append(problem.labels.numpy(), label))
        assert refits.limit[q, label] == gone.any(), (q, label)
        expected = limit_by_linear_programming(problem, query, label)
        assert refits.log_lik[q, label].exp().item() == pytest.approx(expected, abs=1e-6)
    assert isinstance(case, int) or refits.limit.any()


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


# NML over label sequences ------------------------------------------------------------------------


def counts_log_lik(sequence: list[int]) -> float:
    """Σ_k n_k log(n_k / n): the best independent labels for a sequence."""
    n = len(sequence)
    return sum(count * math.log(count / n) for count in Counter(sequence).values())


@pytest.mark.parametrize(("n", "classes"), [(1, 2), (6, 2), (4, 3), (3, 4)])
def test_without_features_it_is_the_shtarkov_distribution(n, classes):
    """With only an intercept, the best model predicts the label frequencies."""
    found = nml(torch.ones(n, 1), classes=classes)
    expected = torch.tensor([counts_log_lik(s) for s in found.sequences.tolist()]).double()
    assert found.converged.all()
    torch.testing.assert_close(found.log_lik, expected, rtol=0, atol=1e-6)
    shtarkov = sum(math.exp(value) for value in expected.tolist())
    assert found.complexity.item() == pytest.approx(math.log(shtarkov), abs=1e-6)


CASES = {
    "a line": (with_intercept(normal(0, 6, 1)), 0.0, 2),
    "a plane": (with_intercept(normal(1, 7, 2)), 0.0, 2),
    "three classes": (with_intercept(normal(2, 4, 1)), 0.0, 3),
    "with a penalty": (with_intercept(normal(3, 6, 1)), 0.3, 2),
    "duplicates": (with_intercept(normal(4, 3, 1)).repeat(2, 1), 0.0, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_regret_is_the_same_for_every_sequence_and_no_distribution_has_less(name):
    features, l2, classes = CASES[name]
    found = nml(features, l2, classes)
    assert found.converged.all()
    # The likelihoods come one by one from fits of their own.
    for labels, log_lik in list(zip(found.sequences, found.log_lik, strict=True))[::5]:
        alone = fit(LogisticProblem(features, labels, l2, classes))
        torch.testing.assert_close(log_lik, alone.log_lik, rtol=0, atol=1e-9)
    assert found.log_probs.exp().sum().item() == pytest.approx(1)
    regret = found.regret(found.log_probs)
    torch.testing.assert_close(regret, found.complexity.expand_as(regret))
    rivals = torch.log_softmax(normal(5, 20, len(found.log_lik)), dim=-1)
    uniform = torch.full_like(found.log_lik, -math.log(len(found.log_lik)))
    mixed = torch.logaddexp(found.log_probs, uniform) - math.log(2)
    for rival in (*rivals, uniform, mixed):
        assert found.regret(rival).max() > found.complexity + 1e-6


def test_too_many_sequences_are_refused():
    with pytest.raises(ValueError, match="2\\^21 label sequences"):
        nml(torch.ones(21, 1))


def test_nmap_takes_the_map_of_every_sequence():
    """Against fits by SciPy; a stronger prior leaves less to choose from, and none is NML."""
    features = with_intercept(normal(6, 4, 1))
    found = nml(features, 0.7)
    penalty = torch.full((2,), 0.7).double()
    for labels, log_lik in zip(found.sequences, found.log_lik, strict=True):
        numbers = features.numpy(), labels.numpy(), penalty.numpy()
        weights = torch.from_numpy(refit_by_scipy(*numbers, 2))
        expected = torch.log_softmax(features @ weights.mT, dim=-1).gather(1, labels[:, None]).sum()
        torch.testing.assert_close(log_lik, expected, rtol=0, atol=1e-6)
    regret = found.regret(found.log_probs)
    torch.testing.assert_close(regret, found.complexity.expand_as(regret))
    assert nml(features, 7.0).complexity < found.complexity < nml(features).complexity


# The exact Laplace posterior ---------------------------------------------------------------------


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
    torch.testing.assert_close(fitted.posterior.cov, torch.linalg.inv(hessian))
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
