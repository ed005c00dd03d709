"""The linearised network: exact, whatever the model and the posterior, with one Jacobian."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import acnml
from acnml import Acnml, Classifier, Linearised, metrics
from acnml._util.batches import take
from cases import CONV, LINEAR, MLP, MODELS, POSTERIORS, diagonal, normal
from heads import by_scipy
from test_problem import dense_kernel
from test_solvers import GRID, Scale, renamed

TIGHT = Linearised(tolerance=1e-11)


def by_oracle(model: nn.Module, posterior: acnml.Posterior, x: object, alpha: float) -> Tensor:
    """log p_θ̂_y(y|x) (B, K) of the linearised network, from a dense J and Σ."""
    logits = Classifier(model).logits(x, posterior.mean).detach()
    rows = []
    for i, z in enumerate(logits):
        V = alpha * dense_kernel(model, posterior, take(x, slice(i, i + 1)))
        rows.append([by_scipy(z, V, y) for y in range(len(z))])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("case", "build"), GRID)
@pytest.mark.parametrize("alpha", [0.05, 3.0])
def test_every_prediction_is_that_of_a_dense_oracle(case, build, alpha):
    model, x = case.model(), case.x(2)
    posterior = build(model)
    solution = Acnml(Classifier(model), posterior, TIGHT, alpha).solve(x)
    expected = by_oracle(model, posterior, x, alpha)
    torch.testing.assert_close(solution.log_lik, expected, rtol=0, atol=1e-9)
    assert (solution.residual <= 1e-9).all()
    assert solution.solved.all()


def test_layers_that_the_engine_does_not_know_are_linearised_too():
    model, x = Scale().double(), normal(2, 4)
    posterior = diagonal(model)
    found = Acnml(Classifier(model), posterior, TIGHT, 0.5).log_lik(x)
    expected = by_oracle(model, posterior, x, 0.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("case", [LINEAR, MLP, CONV], ids=lambda case: case.name)
def test_one_problem_serves_every_alpha(case, name):
    model, x = case.model(), case.x(4)
    predict = Acnml(Classifier(model).tempered(1.3), POSTERIORS[name](model))
    problem = predict.problem(x)
    for alpha in (0.01, 1.0, 30.0):
        own = replace(predict, alpha=alpha)
        found = own.solver.of(problem.scaled(alpha))
        for one, other in zip(found, own.solve(x), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert torch.equal(own.solve_problem(problem).log_lik, found.log_lik)


def test_a_search_over_alpha_takes_one_jacobian(monkeypatch):
    from acnml._engine.rows import Rows

    calls, kernel = [], Rows.kernel
    monkeypatch.setattr(Rows, "kernel", lambda *a: calls.append(1) or kernel(*a))
    model, x = MLP.model(), MLP.x(40)
    predict = Acnml(Classifier(model), diagonal(model))
    labels = torch.arange(40) % 3
    table = acnml.tuning.sweep(
        lambda alpha: replace(predict, alpha=alpha), (0.01, 0.1, 1.0), [(x, labels)]
    )
    assert len(calls) == 1
    for row in table:
        expected = metrics.nll(replace(predict, alpha=row.value)(x), labels)
        assert row.nll == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "low rank"])
@pytest.mark.parametrize("seed", range(8))
def test_random_posteriors_are_solved_and_warn_of_nothing(seed, kind, recwarn):
    """The network itself has several maxima with such posteriors, the linearised one has one."""
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=10 * seed + index))
    mean = Classifier(model).copy_parameters([name for name, _ in model.named_parameters()])
    scales = {n: normal(*t.shape, seed=seed).mul(2).exp() for n, t in mean.items()}
    posterior = acnml.Diagonal(mean, scales)
    if kind == "low rank":
        directions = {n: 3 * normal(2, *t.shape, seed=seed) for n, t in mean.items()}
        posterior = acnml.LowRank(mean, scales, directions)
    x = 3 * normal(4, 4, seed=seed + 100)
    found = Acnml(Classifier(model), posterior, TIGHT).log_lik(x)
    expected = by_oracle(model, posterior, x, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    assert not recwarn.list


class Inside(nn.Module):
    """A network that enters autocast by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **kwargs)


SOLVERS = [Linearised(), Linearised("network", polish=2), acnml.Gradient(2, 0.25)]


@pytest.mark.parametrize("solver", SOLVERS, ids=["linearised", "network", "gradient"])
@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen", "low_rank"])
@pytest.mark.parametrize("case", MODELS[1:4], ids=lambda case: case.name)
def test_autocast_around_or_inside_the_network(case, name, solver):
    exact = case.model()
    posterior = POSTERIORS[name](exact)
    wanted = Acnml(Classifier(exact), posterior, solver, 0.1, "ignore")(case.x()).exp()
    model, narrow = case.model().float(), posterior.to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        around = Acnml(Classifier(model), narrow, solver, 0.1, "ignore")(case.x()).exp()
    prefixed = renamed(narrow, {name: f"model.{name}" for name in posterior.mean})
    inside = Acnml(Classifier(Inside(model)), prefixed, solver, 0.1, "ignore")(case.x()).exp()
    for found in (around, inside):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.03)
