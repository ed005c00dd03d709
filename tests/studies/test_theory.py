"""The theory's estimates, constants and bounds, and the study that measures them."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from acnml import Acnml, Gradient, Linearised
from acnml.exact import LogisticProblem, cnml, fit, laplace, with_intercept
from logistic import normal
from short import Silent, command, no_trace
from studies.theory import study
from studies.theory.bounds import (
    acnml_estimate,
    convex_bounds,
    convex_constants,
    influence_estimate,
    log_prob_bound,
    proposition_bound,
    theorem_bound,
    theorem_constants,
)
from studies.theory.report import report
from studies.theory.study import ACNML, INFLUENCE, MAP, TheoryStudy
from studies.theory.summary import IN_TERMINAL, closing_text, table

EXACTLY = Linearised(tolerance=1e-12)


def sample(n: int, d: int = 2, classes: int = 2, l2: float = 1.0, seed: int = 0) -> LogisticProblem:
    features = with_intercept(normal(seed, n, d))
    logits = features @ normal(seed + 1, classes, d + 1).mT
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    return LogisticProblem(features, labels, l2, classes)


QUERIES = with_intercept(2 * normal(9, 12, 2))


def slope(sizes: list[int], errors: list[float]) -> float:
    """The slope of a line through the logarithms."""
    x = torch.tensor(sizes).double().log()
    y = torch.tensor(errors).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


# Estimates -------------------------------------------------------------------------------------


def test_the_influence_function_is_the_derivative_of_the_refit():
    """Copies of the data make the query's weight small: its effect is then the influence."""
    problem, times = sample(20), 2000
    copies = LogisticProblem(
        problem.features.repeat(times, 1), problem.labels.repeat(times), times * 1.0
    )
    found = fit(problem)
    moved = (cnml(copies, QUERIES).weights[:, :, 1] - found.weights[1]) * times
    expected = influence_estimate(problem, found, QUERIES) - found.weights[1]
    torch.testing.assert_close(moved, expected, rtol=2e-3, atol=1e-4)


def test_one_full_step_of_acnml_is_the_influence_function():
    problem = sample(50)
    fitted = laplace(problem)
    one_step = Gradient(steps=1, step_size=1.0)
    predict = Acnml(fitted.classifier, fitted.posterior, one_step, on_unsolved="ignore")
    log_lik = predict.solve(QUERIES).log_lik
    logits = (influence_estimate(problem, fitted.fit, QUERIES) * QUERIES.unsqueeze(1)).sum(-1)
    expected = torch.nn.functional.logsigmoid(logits * torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(log_lik, expected)


def test_the_acnml_estimate_is_the_maximum_of_acnmls_objective():
    problem = sample(50)
    fitted = laplace(problem)
    log_lik = Acnml(fitted.classifier, fitted.posterior, EXACTLY).solve(QUERIES).log_lik
    estimate = acnml_estimate(problem, fitted.fit, QUERIES, log_lik).requires_grad_()
    logits = (estimate * QUERIES.unsqueeze(1)).sum(-1)
    log_p = torch.nn.functional.logsigmoid(logits * torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(log_p.detach(), log_lik)
    L = torch.linalg.cholesky(fitted.posterior.cov)
    offset = torch.linalg.solve(L, (estimate - fitted.fit.weights[1]).unsqueeze(-1))
    (log_p.sum() - 0.5 * offset.square().sum()).backward()
    assert estimate.grad.abs().max() < 1e-9


# Constants -------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2", [0.1, 5.0])
def test_constants_hold_everywhere_in_the_ball(l2):
    """Random points of a large ball: none breaks a constant."""
    problem = sample(60, l2=l2)
    found = fit(problem)
    c = convex_constants(problem, found, QUERIES)
    x, theta, n = problem.features, found.weights[1], len(problem.features)

    def hessian(point: Tensor) -> Tensor:
        p = torch.sigmoid(x @ point)
        return ((x.mT * (p * (1 - p))) @ x + 2 * l2 * torch.eye(3)) / n

    directions = torch.nn.functional.normalize(normal(1, 200, 3), dim=-1)
    for point in theta + c.radius * torch.linspace(0, 1, 200).unsqueeze(-1) * directions:
        eigenvalues = torch.linalg.eigvalsh(hessian(point))
        assert 1 / eigenvalues[0] <= c.inverse_hessian
        change = torch.linalg.matrix_norm(hessian(point) - hessian(theta), 2)
        distance = (point - theta).norm()
        assert change <= c.mean_lipschitz * distance + 1e-12
        q = torch.sigmoid(QUERIES @ point)
        residual = torch.stack([q, 1 - q], dim=-1)
        assert (residual * QUERIES.norm(dim=-1, keepdim=True) <= c.query.gradient).all()
        assert (residual * QUERIES.norm(1, dim=-1, keepdim=True) <= c.query.gradient_1).all()
        slopes = (q * (1 - q)).unsqueeze(-1)
        assert (slopes * QUERIES.norm(dim=-1, keepdim=True) ** 2 <= c.query.hessian + 1e-12).all()
        entrywise = slopes * QUERIES.norm(1, dim=-1, keepdim=True) ** 2
        assert (entrywise <= c.query.hessian_1 + 1e-12).all()


def test_the_theorems_constants_are_those_of_the_data_the_query_and_its_counterpart():
    """The paper's N = n + 2 points, stacked by hand at random points of the ball."""
    problem = sample(60, l2=0.5)
    found, n = fit(problem), 60
    c = theorem_constants(problem, found, QUERIES)
    theta, N = found.weights[1], n + 2
    assert c.points == N

    def stacked(point: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of label 0 and Hessians of the training data, the query, and against it."""
        x = torch.cat([problem.features, query.expand(2, -1)])
        p, labels = torch.sigmoid(x @ point), torch.cat([problem.labels, torch.zeros(2)])
        signs = torch.tensor([1.0] * (n + 1) + [-1.0]).double()
        gradients = (signs * (p - labels)).unsqueeze(-1) * x
        hessians = (signs * p * (1 - p))[:, None, None] * x.unsqueeze(-1) * x.unsqueeze(-2)
        prior = (torch.arange(N) < n)[:, None, None] * 2 * 0.5 / n * torch.eye(3)
        return gradients, hessians + prior

    weights = torch.ones(N).double()
    weights[n] = 2
    assert c.weight_norm == pytest.approx((weights.square().mean().sqrt()).item())
    directions = torch.nn.functional.normalize(normal(1, 40, 3), dim=-1)
    for point in theta + c.radius * torch.linspace(0, 1, 40).unsqueeze(-1) * directions:
        for row, query in enumerate(QUERIES):
            gradients, hessians = stacked(point, query)
            mean = hessians.mean(0)
            assert 1 / torch.linalg.eigvalsh(mean)[0] <= c.inverse_hessian * (1 + 1e-9)
            change = (hessians - stacked(theta, query)[1]).square().sum().div(N).sqrt()
            allowed = c.rms_lipschitz[row] * (point - theta).norm()
            assert change <= allowed + 1e-12
            added = weights - 1
            for pulled in (added @ gradients / N, torch.tensordot(added, hessians, 1) / N):
                assert pulled.abs().sum() <= c.delta[row, 0] * (1 + 1e-9)


# Bounds ----------------------------------------------------------------------------------------

PROBLEMS = [
    (n, l2, seed) for n in (100, 1000, 10_000) for l2 in (0.1, 1.0, 10.0) for seed in (0, 1)
]


@pytest.mark.parametrize(("n", "l2", "seed"), PROBLEMS)
def test_no_error_exceeds_its_bound(n, l2, seed):
    problem = sample(n, l2=l2, seed=seed)
    fitted, refits = laplace(problem), cnml(problem, QUERIES)
    exact = refits.weights[:, :, 1]
    convex = convex_constants(problem, fitted.fit, QUERIES)
    theorem = theorem_constants(problem, fitted.fit, QUERIES)
    bounds = convex_bounds(convex)
    assert ((exact - fitted.fit.weights[1]).norm(dim=-1) <= convex.shift).all()

    influence = (influence_estimate(problem, fitted.fit, QUERIES) - exact).norm(dim=-1)
    assert (influence <= bounds.influence).all()
    papers = theorem_bound(theorem)
    assert (influence <= papers).all()
    logits = (influence_estimate(problem, fitted.fit, QUERIES) * QUERIES.unsqueeze(1)).sum(-1)
    log_lik = torch.nn.functional.logsigmoid(logits * torch.tensor([-1.0, 1.0]))
    difference = (log_lik.log_softmax(-1) - refits.log_probs).abs().amax(-1)
    assert (difference <= proposition_bound(QUERIES, papers)).all()

    solution = Acnml(fitted.classifier, fitted.posterior, EXACTLY).solve(QUERIES)
    estimate = acnml_estimate(problem, fitted.fit, QUERIES, solution.log_lik)
    assert ((estimate - exact).norm(dim=-1) <= bounds.acnml).all()
    difference = (solution.log_probs - refits.log_probs).abs().amax(-1)
    assert (difference <= log_prob_bound(convex, bounds.acnml)).all()
    # Infinite bounds would prove nothing; only the theorem's condition needs many data.
    assert bounds.influence.isfinite().all()
    assert papers.isfinite().any() or n < 10_000
    # As printed, with 1/n for one half, the condition is never met.
    assert theorem_bound(theorem, share=1 / n).isinf().all()


def test_without_a_large_enough_ball_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr("studies.theory.bounds.RADII", (1.0,))
    problem = sample(50, l2=0.01)
    c = convex_constants(problem, fit(problem), 20 * QUERIES)
    bounds = convex_bounds(c)
    assert (bounds.acnml[c.shift > c.radius] == math.inf).all()
    assert (c.shift > c.radius).any()


# Rates -----------------------------------------------------------------------------------------

# Rates are for many data: with 12 queries, some of them far out, a few hundred are not many.
SIZES = [1000, 4000, 16_000]


@pytest.mark.parametrize("classes", [2, 3])
def test_acnml_converges_to_exact_cnmap_like_n_to_the_minus_2(classes):
    errors = []
    for n in SIZES:
        problem = sample(n, classes=classes)
        fitted = laplace(problem)
        approximate = Acnml(fitted.classifier, fitted.posterior, EXACTLY)(QUERIES)
        errors.append((approximate - cnml(problem, QUERIES).log_probs).abs().max().item())
    assert slope(SIZES, errors) <= -1.8


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [(influence_estimate, -2), (lambda _, found, x: found.weights[1].expand(len(x), 2, -1), -1)],
    ids=["influence function", "no adaptation"],
)
def test_errors_of_the_parameters_fall_at_their_rates(estimate, expected):
    errors = []
    for n in SIZES:
        problem = sample(n)
        refitted = cnml(problem, QUERIES).weights[:, :, 1]
        errors.append(
            (estimate(problem, fit(problem), QUERIES) - refitted).norm(dim=-1).max().item()
        )
    assert slope(SIZES, errors) == pytest.approx(expected, abs=0.2)


# Study -----------------------------------------------------------------------------------------

tiny_study = partial(TheoryStudy, sizes=(300, 1200, 4800), queries=4, spread=1.5)


@pytest.fixture(scope="module")
def findings():
    return study.run(tiny_study(), Silent())


def test_the_same_seed_gives_the_same_numbers_and_leaves_no_trace(findings):
    progress = Silent()
    with no_trace():
        again = study.run(tiny_study(), progress)
    assert table(again) == table(findings)
    assert progress.done == findings.study.work


def test_the_study_finds_the_rates_and_breaks_no_bound(findings):
    assert findings.broken == 0
    assert all(m.converged for m in findings.measured)
    for method, expected in ((MAP, -1), (INFLUENCE, -2), (ACNML, -2)):
        assert findings.parameter_slope(method) == pytest.approx(expected, abs=0.2)
        assert findings.log_prob_slope(method) == pytest.approx(expected, abs=0.2)


def test_the_command_shows_a_table_and_writes_the_report(monkeypatch, tmp_path, findings):
    monkeypatch.setattr(study, "TheoryStudy", tiny_study)
    output = command("theory", "--out", tmp_path)
    for row in table(findings):
        cells = (re.escape(row[column]) for column in IN_TERMINAL)
        assert re.search(r"^ +" + r" +".join(cells), output, re.MULTILINE)
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["n", "300", "1200", "4800"]
    assert f"Report: {tmp_path / 'report.html'}" in output
    assert closing_text(findings) in " ".join(output.split())
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report(findings).html()
