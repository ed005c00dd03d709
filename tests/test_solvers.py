"""The fast solvers equal the reference, over the full grid of models and posteriors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier, Diagonal, Gradient, Linearised
from acnml._engine.rows import Rows
from acnml.solve import Reference, UnsolvedError
from acnml.solve.logits import solve
from cases import MODELS, POSTERIORS, Case, affine_layers, diagonal, normal
from predicting import Idle


class Residual(nn.Module):
    """A skip connection around every layer, the first one included."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x + torch.tanh(self.first(x))
        return self.head(x + torch.tanh(self.second(x)))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Norms(nn.Module):
    """Normalisation layers first, in place activations, group norm and padding modes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.conv = nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular", dilation=2)
        self.group = nn.GroupNorm(2, 4)
        self.activation = nn.ELU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.activation(self.group(self.conv(self.norm(x))))
        return self.head(hidden.mean((2, 3)))


MORE = [
    Case("residual", Residual, lambda n: normal(n, 4)),
    Case("twice", Twice, lambda n: normal(n, 4)),
    Case("norms", Norms, lambda n: normal(n, 2, 5, 5)),
]
GRID = [
    pytest.param(case, build, id=f"{case.name}-{name}")
    for case in [*MODELS, *MORE]
    for name, build in POSTERIORS.items()
]
each_case = pytest.mark.parametrize(("case", "build"), GRID)


def assert_same(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual.log_lik, expected.log_lik, rtol=0, atol=tolerance)
    torch.testing.assert_close(actual.residual, expected.residual, rtol=0, atol=tolerance)


@each_case
@pytest.mark.parametrize("steps", [0, 4])
def test_gradient_is_the_reference(case, build, steps):
    model, x = case.model(), case.x(3)
    posterior = build(model).scaled(0.5)
    expected = Reference(steps, 0.3)(Classifier(model), posterior, x)
    assert_same(Gradient(steps, 0.3)(Classifier(model), posterior, x), expected)


@each_case
@pytest.mark.parametrize("force", [True, False])
def test_factored_or_written_out_is_the_same(case, build, force, monkeypatch):
    model, x = case.model(), case.x(2)
    posterior = build(model)
    expected = Gradient(3, 0.4)(Classifier(model), posterior, x)
    monkeypatch.setattr(type(posterior), "prefers_factors", lambda *_: force)
    actual = Gradient(3, 0.4)(Classifier(model), posterior, x)
    assert_same(actual, expected)
    rows = Rows.at_mean(Classifier(model), posterior, x, 3)
    assert bool(rows.factored) == force


@each_case
def test_gradients_by_pairs_or_in_tiles_have_the_same_covariance(case, build, monkeypatch):
    model, x = case.model(), case.x(2)
    posterior = build(model)
    expected = Rows.at_mean(Classifier(model), posterior, x, 1).kernel()
    monkeypatch.setattr("acnml._algebra.dual.TILE", 8)
    for pairs in (0.0, math.inf):
        monkeypatch.setattr("acnml._algebra.dual.PAIRS", pairs)
        actual = Rows.at_mean(Classifier(model), posterior, x, 1).kernel()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@each_case
def test_linearised_is_the_reference_where_the_model_is_linear(case, build):
    """The reference at convergence, for a posterior over the last layer alone."""
    model, x = case.model(), case.x(3)
    posterior = POSTERIORS["last_layer"](model)
    if build is not POSTERIORS["last_layer"]:
        layer = affine_layers(model)[-1]
        posterior = build(nn.ModuleDict({"head": last_module(model)}))
        posterior = renamed(posterior, {f"head.{n.rpartition('.')[2]}": n for n in layer.names})
    posterior = posterior.scaled(0.2)
    expected = Reference(60, 0.5)(Classifier(model), posterior, x)
    solution = Linearised(tolerance=1e-11)(Classifier(model), posterior, x)
    assert_same(solution, expected)
    tempered = Classifier(model).tempered(1.7)
    expected = Reference(60, 0.5)(tempered, posterior, x)
    assert_same(Linearised(tolerance=1e-11)(tempered, posterior, x), expected)


def last_module(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def renamed(posterior, names: dict[str, str]):
    """The same posterior over parameters of other names."""
    from dataclasses import fields, is_dataclass, replace

    from acnml.posteriors import Affine

    def rename(value):
        if isinstance(value, dict):
            return {names[key]: item for key, item in value.items()}
        if isinstance(value, Affine):
            return replace(value, weight=names[value.weight], bias=value.bias and names[value.bias])
        if isinstance(value, tuple):
            return tuple(rename(item) for item in value)
        if is_dataclass(value):
            return type(value)(**{f.name: rename(getattr(value, f.name)) for f in fields(value)})
        return value

    return rename(posterior)


@pytest.mark.parametrize("case", [*MODELS[1:3], *MORE], ids=lambda case: case.name)
@pytest.mark.parametrize("name", POSTERIORS)
def test_polishing_converges_to_the_reference(case, name):
    model, x = case.model(), case.x(2)
    posterior = POSTERIORS[name](model).scaled(0.1)
    expected = Reference(100, 0.5)(Classifier(model), posterior, x)
    solver = Linearised("network", polish=40, polish_tolerance=1e-11, tolerance=1e-11)
    solution = solver(Classifier(model), posterior, x)
    # The square of a residual is a difference of larger numbers, so it ends at √ of rounding
    # errors.
    assert max(expected.residual.max(), solution.residual.max()) < 1e-7
    torch.testing.assert_close(solution.log_lik, expected.log_lik, rtol=0, atol=1e-9)


@each_case
def test_the_network_is_evaluated_at_the_linearised_solution(case, build):
    """Evaluate the model at θ = μ + ΣJᵀu, with u from the dense kernel."""
    model, x = case.model(), case.x(1)
    posterior, classifier = build(model).scaled(0.5), Classifier(model)
    jacobian = torch.func.jacrev(lambda theta: classifier.logits(x, theta)[0])(posterior.mean)
    moved = posterior.cov_mv(jacobian)
    kernel = sum(j.flatten(1) @ moved[n].flatten(1).T for n, j in jacobian.items())
    labels = torch.arange(3)
    u = solve(classifier.logits(x), kernel[None], labels, 1e-12, 100).u[0]
    solution = Linearised("network", tolerance=1e-12)(classifier, posterior, x)
    for y in range(3):
        theta = {n: t + torch.tensordot(u[y], moved[n], dims=1) for n, t in posterior.mean.items()}
        assert abs(classifier.log_probs(x, theta)[0, y] - solution.log_lik[0, y]) < 1e-9


@pytest.mark.parametrize(
    "solver",
    [Gradient(3, 0.4), Linearised(), Linearised("network", polish=2, polish_tolerance=1e-9)],
)
@pytest.mark.parametrize("memory", [1, 20_000, 10**9])
def test_the_memory_budget_changes_nothing_but_the_blocks(solver, memory):
    from dataclasses import replace

    case = MODELS[2]
    model, x = case.model(), case.x(5)
    posterior = diagonal(model)
    expected = solver(Classifier(model), posterior, x)
    actual = replace(solver, memory=memory)(Classifier(model), posterior, x)
    assert_same(actual, expected, 1e-11)


class Scale(nn.Module):
    """A parameter that does not belong to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.scale * x)


@pytest.mark.parametrize("solver", [Gradient(), Linearised("network")])
def test_parameters_that_cannot_be_handled_are_named_with_the_way_out(solver):
    model = Scale().double()
    with pytest.raises(ValueError, match=r"parameters \['scale'\].*leave it out.*solve\.Reference"):
        solver(Classifier(model), diagonal(model), normal(2, 4))
    head = diagonal(model, ["head.weight", "head.bias"])
    assert solver(Classifier(model), head, normal(2, 4)).log_lik.shape == (2, 3)


@pytest.mark.parametrize("solver", [Gradient(), Linearised()])
def test_unused_layers_are_allowed_unless_all_are_unused(solver):
    model = Idle().double()
    for build in POSTERIORS.values():
        expected = Reference(5, 0.5)(Classifier(model), diagonal(model), normal(2, 4))
        if build is not POSTERIORS["last_layer"] and isinstance(solver, Gradient):
            assert_same(solver(Classifier(model), diagonal(model), normal(2, 4)), expected)
    with pytest.raises(ValueError, match="use none of the posterior's parameters"):
        solver(Classifier(model), diagonal(model, ["idle.weight"]), normal(2, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gradient(steps=-1), "steps must be ≥ 0"),
        (lambda: Gradient(step_size=0.0), "step_size must be a positive"),
        (lambda: Linearised(polish=-1), "polish must be ≥ 0"),
        (lambda: Linearised(newton_steps=0), "newton_steps ≥ 1"),
        (lambda: Linearised(tolerance=0.0), "tolerance must be a positive"),
        (lambda: Linearised(polish_tolerance=0.0), "polish_tolerance must be a positive"),
        (lambda: Linearised(polish=3), 'add evaluate="network"'),
        (lambda: Linearised("true"), "evaluate must be"),
        (lambda: Reference(steps=-1), "steps must be ≥ 0"),
        (lambda: Reference(rows_at_once=0), "rows_at_once ≥ 1"),
        (lambda: Reference(step_size=float("nan")), "step_size must be a positive"),
    ],
)
def test_refuses_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("solver", [Gradient(steps=20), Reference(steps=20)])
def test_divergence_is_an_error_with_a_remedy(solver):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    mean = {n: p.detach() for n, p in model.named_parameters()}
    wide = Diagonal(mean, {n: torch.full_like(t, 1e30) for n, t in mean.items()})
    with pytest.raises(UnsolvedError, match=r"diverged: lower step_size \(0.5\) or alpha"):
        solver(Classifier(model), wide, torch.randn(2, 4))


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(2 * x)


class Borrowed(nn.Module):
    """A layer whose weight is used without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lender, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.lender.weight))


@pytest.mark.parametrize("solver", [Gradient(), Linearised("network")])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(Doubled(4, 4), nn.Tanh(), nn.Linear(4, 3)),
            r"layer '0' \(Doubled\)",
        ),
        (Borrowed(), r"uses 'lender.weight' (without calling layer 'lender'|differently)"),
    ],
)
def test_layers_that_are_not_what_they_seem_are_refused(solver, model, message):
    model = model.double()
    with pytest.raises(ValueError, match=message):
        solver(Classifier(model), diagonal(model), normal(2, 4))
    with pytest.raises(ValueError, match=message):
        acnml.fit_laplace(Classifier(model), [normal(2, 4)], structure="diag")
    assert Reference()(Classifier(model), diagonal(model), normal(2, 4)).log_lik.shape == (2, 3)
