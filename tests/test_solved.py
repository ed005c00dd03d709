"""Every answer is solved or flagged: no ascent ends below the mean, and no bad row harms others."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from acnml import Acnml, Classifier, Gradient, Linearised, UnsolvedWarning, metrics
from acnml._algebra.dual import combination
from acnml._util.batches import take
from acnml.solve import Reference, Solution, UnsolvedError
from cases import MLP, MODELS, POSTERIORS, TwoLayers, diagonal, last_layer, normal, seeded

WIDE = [
    pytest.param(case, build, id=f"{case.name}-{name}")
    for case in MODELS[1:4]
    for name, build in POSTERIORS.items()
]


def relu_network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))


# No ascent ends below the mean -------------------------------------------------------------------


@pytest.mark.parametrize(("case", "build"), WIDE)
@pytest.mark.parametrize("polish", [0, 3])
@pytest.mark.parametrize("alpha", [1.0, 100.0])
def test_no_label_is_explained_worse_than_at_the_mean(case, build, polish, alpha):
    model, x = case.model(), case.x(4)
    posterior, classifier = build(model).scaled(alpha), Classifier(model)
    solution = Linearised("network", polish=polish)(classifier, posterior, x)
    assert (solution.log_lik >= classifier.log_probs(x, posterior.mean) - 1e-12).all()
    assert (solution.regret >= -1e-12).all()
    assert (solution.regret <= math.log(3) + 1e-12).all()


def steps_of(solver, classifier, posterior, x):
    """Solve, and return the solution with the points before and after every step of the ascent."""
    from acnml.solve import ascent

    seen, chosen = [], ascent._chosen

    def spy(better, new, old):
        seen.append((old, chosen(better, new, old)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ascent, "_chosen", spy)
        solution = solver(classifier, posterior, x)
    return solution, seen


def objective(classifier, posterior, x, climb):
    """log p_θ(y|x) + log q(θ) - log q(μ) at the weights themselves, (B, K)."""
    v = combination(climb.points, climb.coefficients).materialised(posterior.mean)
    theta = {n: posterior.mean[n] + moved for n, moved in posterior.cov_mv(v).items()}
    prior = posterior.log_prob(theta) - posterior.log_prob(posterior.mean)
    own = [
        [classifier.log_probs(x[b : b + 1], at(theta, b, y))[0, y] for y in range(prior.shape[1])]
        for b in range(len(x))
    ]
    return torch.stack([torch.stack(row) for row in own]) + prior


def at(theta, *row):
    return {n: t[row] for n, t in theta.items()}


@pytest.mark.parametrize("name", [name for name in POSTERIORS if name != "last_layer"])
@pytest.mark.parametrize("alpha", [0.3, 30.0])
def test_no_step_lowers_the_objective(name, alpha):
    """The objective that the ascent keeps track of is log p + log q, and it never falls."""
    model, x = MLP.model(), MLP.x(3)
    posterior, classifier = POSTERIORS[name](model).scaled(alpha), Classifier(model)
    # With this tolerance, no row ends before the last step.
    solver = Linearised("network", polish=6, polish_tolerance=1e-12)
    solution, seen = steps_of(solver, classifier, posterior, x)
    assert len(seen) == solver.polish
    for old, new in seen:
        literal = objective(classifier, posterior, x, new)
        torch.testing.assert_close(new.objective, literal, rtol=1e-9, atol=1e-9)
        assert (new.objective >= old.objective - 1e-10).all()
    (first, _), (_, last) = seen[0], seen[-1]
    assert (last.objective > first.objective + 1e-6).any()
    torch.testing.assert_close(solution.log_lik, last.log_lik, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("alpha", [1.0, 10.0])
def test_polishing_converges_with_wide_posteriors(name, alpha):
    model, x = MLP.model(), MLP.x(5)
    posterior, classifier = POSTERIORS[name](model).scaled(alpha), Classifier(model)
    solution = Linearised("network", polish=60)(classifier, posterior, x)
    assert (solution.residual <= 0.05).all()
    assert solution.solved.all()


# Unsolved labels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [Gradient(1, 0.1), Reference(1, 0.1), Linearised("network")])
def test_solved_is_a_small_residual(solver):
    model, x = MLP.model(), MLP.x(5)
    solution = solver(Classifier(model), diagonal(model).scaled(3.0), x)
    assert solution.solved.dtype == torch.bool
    assert torch.equal(solution.solved, solution.residual <= 0.1)
    assert not solution.solved.all()


@dataclass(frozen=True)
class Known:
    """A solver whose residuals are known."""

    residual: tuple[float, ...]

    def __call__(self, classifier, posterior, x):
        residual = torch.tensor(self.residual, dtype=torch.float64)[:, None].expand(-1, 3)
        log_lik = classifier.log_probs(x)
        return Solution(log_lik, residual)

    def log_lik(self, classifier, posterior, x):
        return self(classifier, posterior, x).log_lik


def known(*residual: float, **settings) -> Acnml:
    model = MLP.model()
    return Acnml(Classifier(model), diagonal(model), Known(residual), **settings)


USES = [Acnml.__call__, Acnml.regret, Acnml.log_lik, Acnml.solve]


@pytest.mark.parametrize("use", USES)
def test_one_warning_per_call_counts_the_unsolved_labels(use):
    with pytest.warns(UnsolvedWarning) as caught:
        use(known(0.0, 0.3, 0.1), MLP.x(3))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "3 of 9 labels are not solved (the largest residual is 0.3" in message
    assert "for 1 of 3 inputs, first at index 1;" in message
    assert "The default solver, Linearised(), solves every label." in message
    assert caught[0].filename == __file__


@pytest.mark.parametrize("use", USES)
def test_unsolved_labels_may_be_errors_that_name_the_inputs(use):
    with pytest.raises(UnsolvedError, match="for 2 of 3 inputs, first at index 0, 2;") as refused:
        use(known(0.3, 0.0, math.nan, on_unsolved="raise"), MLP.x(3))
    assert refused.value.rows == (0, 2)


@pytest.mark.parametrize("use", USES)
def test_solved_or_ignored_labels_are_silent(use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(known(0.0, 0.0, 0.1), MLP.x(3))
        use(known(0.0, 1.0, math.nan, on_unsolved="ignore"), MLP.x(3))


# Inputs without an answer ------------------------------------------------------------------------


class Undefined(TwoLayers):
    """A network whose logits are NaN if the first feature is negative."""

    def forward(self, x):
        return super().forward(x) * torch.where(x[:, :1] > 0, 1.0, math.nan)


def nan_input() -> tuple[nn.Module, torch.Tensor]:
    x = normal(6, 4)
    x[2, 1] = math.nan
    return MLP.model(), x


def nan_logits() -> tuple[nn.Module, torch.Tensor]:
    x = normal(6, 4).abs()
    x[2, 0] = -1
    return seeded(Undefined), x


def huge_input() -> tuple[nn.Module, torch.Tensor]:
    """Finite logits, but covariances that overflow, or an iteration that diverges."""
    x = normal(6, 4)
    x[2] = 1e160
    return relu_network(), x


SOLVERS = {
    "linearised": Linearised(),
    "network": Linearised("network"),
    "gradient": Gradient(3, 0.3),
    "reference": Reference(3, 0.3),
}
BAD = pytest.mark.parametrize("make", [nan_input, nan_logits, huge_input])


@BAD
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_bad_row_is_flagged_or_named_and_touches_no_other(make, solver):
    model, x = make()
    predict = Acnml(Classifier(model), diagonal(model), solver, 0.1, "ignore", "flag")
    good = torch.tensor([0, 1, 3, 4, 5])
    solution, alone = predict.solve(x), predict.solve(take(x, good))
    assert solution.failed.tolist() == [False, False, True, False, False, False]
    for found, expected in zip(solution, alone, strict=True):
        assert torch.equal(found[good], expected)
    assert not solution.solved[2].any()
    assert solution.log_probs[2].isnan().all()
    assert solution.regret[2].isnan()
    log_probs = predict(x)
    assert torch.equal(log_probs[good], predict(take(x, good)))
    assert log_probs[2].isnan().all()
    with pytest.raises(ValueError, match=r"log_probs\[2\] contains NaN"):
        metrics.accuracy(log_probs, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="for 1 of 6 inputs, first at index 2; ") as refused:
        replace(predict, on_error="raise")(x)
    assert refused.value.rows == (2,)


@BAD
def test_a_bad_row_of_a_last_layer_is_flagged(make):
    model, x = make()
    predict = Acnml(Classifier(model), last_layer(model), alpha=0.1, on_error="flag")
    solution = predict.solve(x)
    if make is huge_input:  # a convex problem: it may have an answer
        assert solution.failed[2] or solution.solved[2].all()
    else:
        assert solution.failed.tolist() == [False, False, True, False, False, False]
    assert solution.solved[[0, 1, 3, 4, 5]].all()


def test_rows_are_named_by_their_index_in_the_whole_batch():
    model, x = relu_network(), normal(600, 4)
    x[[290, 555]] = 1e160
    small = Linearised(memory=100_000)  # several chunks within the first 256 inputs too
    predict = Acnml(Classifier(model), diagonal(model).scaled(1e-4), small)
    with pytest.raises(UnsolvedError, match="for 1 of 600 inputs, first at index 290; "):
        predict(x)
    solution = replace(predict, on_error="flag").solve(x)
    assert solution.failed.nonzero().flatten().tolist() == [290, 555]


def test_a_batch_without_any_answer_is_all_flagged():
    model = MLP.model()
    predict = Acnml(Classifier(model), diagonal(model), alpha=0.1, on_error="flag")
    solution = predict.solve(torch.full((2, 4), math.nan))
    assert solution.failed.all()
    assert solution.log_lik.shape == (2, 3)
    assert not solution.solved.any()
