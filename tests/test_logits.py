"""The solver in logit space against scipy, and what must hold for any problem."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import acnml
from acnml import Acnml, Classifier, Linearised, LowRank
from acnml import problem as making
from acnml.problem import Problem, problems
from acnml.solve import Reference
from acnml.solve import logits as solving
from acnml.solve.logits import solve
from cases import POSTERIORS, normal, seeded
from heads import KINDS, by_scipy, kernel

each_kind = pytest.mark.parametrize("kind", KINDS)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def spread(classes: int) -> list[int]:
    """Some labels of many."""
    return list(range(0, classes, 1 if classes <= 10 else 2 * classes // 3))


@each_kind
@pytest.mark.parametrize("alpha", [1e-4, 1e-2, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("classes", [2, 3, 10, 16, 17, 150])
def test_solutions_are_those_of_scipy(kind, classes, alpha):
    logits, V = 3 * normal(2, classes, seed=1), alpha * kernel(kind, 2, classes)
    solved = solve(logits, V)
    assert (solved.residual <= 1e-9).all()
    for i in range(2 if classes <= 10 else 1):
        for y in spread(classes):
            expected = by_scipy(logits[i], V[i], y)
            close(solved.log_lik[i, y].item(), expected, 1e-9 * max(1, abs(expected)))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("classes", [2, 5, 30, 400])
def test_u_is_the_fixed_point_for_the_labels_asked_for(scale, classes):
    logits, root = 3 * normal(4, classes), normal(4, classes, classes + 2, seed=1)
    V, labels = scale * root @ root.mT / classes, torch.arange(classes)[-5:].flip(0)
    found = solve(logits, V, labels, 1e-11)
    log_probs = (logits[:, None] + found.u @ V).log_softmax(-1)
    close(found.u, torch.eye(classes).double()[labels] - log_probs.exp(), 1e-8)
    close(found.log_lik, log_probs[:, range(len(labels)), labels])


@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen", "low_rank"])
def test_many_classes_are_those_of_the_papers_iteration(name):
    """A head with a temperature, in double and in single precision."""
    model, x = seeded(lambda: nn.Linear(5, 70)), normal(3, 5)
    posterior = POSTERIORS[name](model).scaled(0.05)
    classifier = Classifier(model).tempered(0.5)
    literal = Reference(steps=300, step_size=0.2)(classifier, posterior, x)
    exact = Linearised(tolerance=1e-10)(classifier, posterior, x)
    close(exact.log_lik, literal.log_lik, 1e-8)
    single = Classifier(model.float()).tempered(0.5)
    found = Linearised()(single, posterior.to("cpu", torch.float32), x.float())
    assert found.log_lik.dtype == torch.float32
    close(found.log_lik.double(), literal.log_lik, 1e-4)


def test_the_residual_says_how_far_a_row_is():
    logits, V = 3 * normal(2, 12), 10 * kernel("dense", 2, 12, coupling=2.0)
    expected = solve(logits, V)
    rough = solve(logits, V, steps=1)
    assert rough.residual.max() > 1e-6
    far = (rough.log_lik - expected.log_lik).abs()
    reach = (2 * expected.log_lik - 2 * logits.log_softmax(-1)).clamp(min=0).sqrt()  # ≥ ‖u‖
    assert (far <= rough.residual * (reach + 2 * rough.residual) + 1e-9).all()


# Any problem: the seed, the number of classes, and orders of magnitude.
any_problem = given(
    seed=st.integers(0, 10**6),
    classes=st.sampled_from([2, 3, 5, 10, 17, 70]),
    kind=st.sampled_from([*KINDS, "low rank", "ties"]),
    log_alpha=st.floats(-4, 4),
    log_logits=st.floats(-2, 4),
)


def problem(seed, classes, kind, log_logits):
    logits = 10**log_logits * normal(3, classes, seed=seed)
    if kind == "low rank":
        factor = normal(3, classes, 2, seed=seed + 1)
        return logits, factor @ factor.mT
    if kind == "ties":
        return logits.round(decimals=-2), torch.diag_embed(torch.ones_like(logits))
    return logits, kernel(kind, 3, classes, coupling=1.0)


@settings(max_examples=60, deadline=None)
@any_problem
@example(seed=0, classes=70, kind="low rank", log_alpha=1.0, log_logits=0.0)  # a null space
@example(seed=49, classes=10, kind="low rank", log_alpha=2.0, log_logits=1.0)
def test_bounds_and_batches(seed, classes, kind, log_alpha, log_logits):
    logits, V = problem(seed, classes, kind, log_logits)
    V = 10**log_alpha * V
    solved = solve(logits, V)
    assert solved.log_lik.isfinite().all()
    assert (solved.log_lik >= logits.log_softmax(-1)).all()
    assert (solved.log_lik <= 1e-12).all()
    regret = solved.log_lik.logsumexp(-1)
    assert (regret >= -1e-12).all()
    assert (regret <= math.log(classes) + 1e-12).all()
    reachable = 1e-9 + 1e-14 * V.diagonal(dim1=1, dim2=2).max() ** 1.5
    assert (solved.residual <= reachable).all()
    for i in range(3):
        alone = solve(logits[i : i + 1], V[i : i + 1])
        close(alone.log_lik[0], solved.log_lik[i], 1e-8)


@pytest.mark.parametrize("scale", [1e-12, 1e4, 1e8])
@pytest.mark.parametrize("logits", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("rank", [1, 3, 12])
def test_extremes_are_solved_or_say_so(scale, logits, rank):
    factor = normal(4, 12, rank, seed=3)
    solved = solve(logits * normal(4, 12), scale * factor @ factor.mT)
    assert solved.log_lik.isfinite().all()
    # A V of rank 1 ignores nearly all of a gap, which then need not be small: √(FᵀVF) is only known
    # up to √eps · √scale.
    known = 1e-7 if rank == 1 and scale == 1e8 else 1e-9
    assert (solved.residual <= 1e-9 + known * scale**0.5).all()


@pytest.mark.parametrize("classes", [12, 20])
def test_inputs_and_labels_are_solved_in_blocks(classes, monkeypatch):
    widths = torch.logspace(-3, 3, 8).double()
    logits, V = 3 * normal(8, classes), widths[:, None, None] * kernel("dense", 8, classes)
    expected = solve(logits, V)
    for block in (1, 5 * classes, 2 * classes**2):
        monkeypatch.setattr(solving, "BLOCK", block)
        for one, other in zip(solve(logits, V), expected, strict=True):
            close(one, other, 1e-8)


@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen", "low_rank"])
@pytest.mark.parametrize("classes", [3, 70])
def test_inputs_are_cut_to_the_memory(name, classes, monkeypatch):
    model, x = nn.Linear(4, classes).double(), normal(7, 4)
    posterior, classifier = POSTERIORS[name](model), Classifier(model).tempered(1.5)

    def parts(memory):
        return [*problems(classifier, posterior, x, memory)]

    def sizes(memory):
        return [len(part) for part in parts(memory)]

    assert sizes(None) == [7]
    assert sizes(1) == [1] * 7
    of_one = 8 * classes * (making.VECTORS + making.MATRICES * classes)
    assert sizes(3 * of_one) == [3, 3, 1]
    monkeypatch.setattr(making, "PART", 2 * of_one)
    assert sizes(None) == [2, 2, 2, 1]
    whole, joined = (Problem.joined(parts(memory)) for memory in (10**9, 1))
    for one, other in zip(Linearised().of(whole), Linearised().of(joined), strict=True):
        close(one, other, 1e-12)


def test_rows_that_cannot_be_solved_are_named():
    logits, V = normal(7, 3), kernel("dense", 7, 3)
    V[[2, 5]] = torch.nan
    with pytest.raises(acnml.solve.UnsolvedError) as raised:
        Linearised().of(Problem(logits, V))
    assert raised.value.rows == (2, 5)
    assert raised.value.total == 7
    with pytest.raises(acnml.solve.UnsolvedError, match="covariances of the logits are NaN"):
        Problem.of(logits, V)


@pytest.mark.parametrize("lead", [2.0, 5.757080287844746, 12.0, 40.0])
@pytest.mark.parametrize("variance", [0.1, 11.507819863388864, 150.0, 1e5])
def test_newton_does_not_zigzag(lead, variance):
    """Two classes and one logit: z = lead and its posterior variance, at hand in one dimension."""
    logits = torch.tensor([[lead, 0.0]], dtype=torch.float64)
    V = torch.tensor([[[variance, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    found = solve(logits, V)
    assert found.residual.max() <= 1e-9
    t = found.u[0, :, 0]  # e_y - p, by the first class
    close(t, torch.tensor([1.0, 0.0]).double() - torch.sigmoid(lead + variance * t))


@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_large_kernels_of_low_rank(scale):
    root = normal(20, 10, 3)
    V = scale * root @ root.mT
    assert solve(normal(20, 10, seed=1), V, tolerance=1e-5).residual.max() < 1e-2


def test_far_inputs_are_solved_or_say_so():
    model = nn.Linear(3, 10, bias=False)
    classifier = Classifier(model)
    mean = classifier.copy_parameters(["weight"])
    directions = {"weight": normal(3, 10, 3).float()}
    wide = LowRank(mean, {"weight": torch.full_like(mean["weight"], 1e-6)}, directions)
    assert Acnml(classifier, wide).solve(100 * normal(6, 3).float()).residual.max() < 0.1
    with pytest.raises(ValueError, match="not solved after 1 Newton steps: a residual of"):
        Acnml(classifier, wide, Linearised(newton_steps=1))(100 * normal(6, 3).float())
