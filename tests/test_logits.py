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
from acnml._algebra.kernels import DenseKernel, DiagonalKernel
from acnml.problem import Features, Problem, of_features
from acnml.solve import newton
from acnml.solve.logits import Precision, coefficients, solve
from cases import POSTERIORS, affine_layers, normal
from heads import KINDS, by_scipy, kernel

ALL = Precision(negligible=0.0)
each_kind = pytest.mark.parametrize("kind", KINDS)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def spread(classes: int) -> list[int]:
    """Some labels of many."""
    return list(range(0, classes, 1 if classes <= 10 else 2 * classes // 3))


@each_kind
@pytest.mark.parametrize("alpha", [1e-4, 1e-2, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("classes", [2, 3, 10, 64, 65, 150])
def test_solutions_are_those_of_scipy(kind, classes, alpha):
    logits, V = 3 * normal(2, classes, seed=1), kernel(kind, 2, classes).scaled(alpha)
    solved = solve(logits, V, ALL)
    assert (solved.omitted == 0).all()
    assert (solved.residual <= 1e-9).all()
    matrices = V.dense()
    for i in range(2 if classes <= 10 else 1):
        for y in spread(classes):
            expected = by_scipy(logits[i], matrices[i], y)
            close(solved.log_lik[i, y].item(), expected, 1e-9 * max(1, abs(expected)))


@each_kind
def test_a_thousand_classes(kind):
    logits, V = 4 * normal(1, 1000, seed=1), kernel(kind, 1, 1000, coupling=0.2)
    solved = solve(logits, V)
    solved_for = (solved.omitted == 0)[0].nonzero()[:, 0]
    labels = solved.log_lik[0].topk(8).indices
    assert set(labels.tolist()) <= set(solved_for.tolist())
    assert (solved.residual[0, solved_for] <= 1e-9).all()
    u = coefficients(logits, V, labels)[0]
    z = logits + V.take(slice(0, 1)).mv(u[None])[0]
    close(u, nn.functional.one_hot(labels, 1000) - z.softmax(-1))
    close(solved.log_lik[0, labels], z.log_softmax(-1)[range(8), labels])


@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen"])
def test_single_precision_models_get_the_solution_of_double_precision_ones(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(5, 70).double()
    posterior, x = POSTERIORS[name](model).scaled(0.05), normal(3, 5)
    exact = Linearised(negligible=0)(Classifier(model), posterior, x)
    single = Classifier(model.float())
    found = Linearised(negligible=0)(single, posterior.to("cpu", torch.float32), x.float())
    assert found.log_lik.dtype == torch.float32
    close(found.log_lik.double(), exact.log_lik, 1e-4)


@each_kind
@pytest.mark.parametrize("seed", range(4))
def test_labels_left_out_gain_no_more_than_their_bound(kind, seed):
    logits = (3 + seed) * normal(2, 90, seed=seed)
    V = kernel(kind, 2, 90, coupling=0.2 * (1 + seed)).scaled(0.1 * 3.0**seed)
    exact, pruned = (solve(logits, V, Precision(1e-9, 50, n)) for n in (0.0, 0.02))
    left_out = pruned.omitted > 0
    gain = exact.log_lik.exp() - pruned.log_lik.exp()
    assert (pruned.omitted.sum(-1) <= 0.02).all()
    assert (gain[left_out] <= pruned.omitted[left_out] + 1e-12).all()
    close(pruned.log_lik[left_out], logits.log_softmax(-1)[left_out], 1e-12)
    close(pruned.log_lik[~left_out], exact.log_lik[~left_out])


def test_the_residual_says_how_far_a_row_is():
    logits, V = 3 * normal(2, 20), kernel("dense", 2, 20, coupling=2.0).scaled(10.0)
    expected = solve(logits, V, ALL)
    rough = solve(logits, V, Precision(1e-9, steps=1, negligible=0.0))
    assert rough.residual.max() > 1e-6
    far = (rough.log_lik - expected.log_lik).abs()
    reach = (2 * expected.log_lik - 2 * logits.log_softmax(-1)).clamp(min=0).sqrt()  # ≥ ‖u‖
    assert (far <= rough.residual * (reach + 2 * rough.residual) + 1e-9).all()


# Any problem: the seed, the number of classes, and orders of magnitude.
problems = given(
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
        return logits, DenseKernel(factor @ factor.mT)
    if kind == "ties":
        return logits.round(decimals=-2), DiagonalKernel(torch.ones_like(logits))
    return logits, kernel(kind, 3, classes, coupling=1.0)


@settings(max_examples=60, deadline=None)
@problems
@example(seed=0, classes=70, kind="low rank", log_alpha=1.0, log_logits=0.0)  # a null space
@example(seed=49, classes=10, kind="low rank", log_alpha=2.0, log_logits=1.0)
def test_bounds_and_batches(seed, classes, kind, log_alpha, log_logits):
    logits, V = problem(seed, classes, kind, log_logits)
    V = V.scaled(10**log_alpha)
    solved = solve(logits, V, ALL)
    assert solved.log_lik.isfinite().all()
    assert (solved.log_lik >= logits.log_softmax(-1)).all()
    assert (solved.log_lik <= 1e-12).all()
    regret = solved.log_lik.logsumexp(-1)
    assert (regret >= -1e-12).all()
    assert (regret <= math.log(classes) + 1e-12).all()
    reachable = 1e-9 + 1e-14 * V.diagonal().max() ** 1.5
    assert (solved.residual <= reachable).all()
    for i in range(3):
        alone = solve(logits[i : i + 1], V.take(slice(i, i + 1)), ALL)
        close(alone.log_lik[0], solved.log_lik[i], 1e-8)


@pytest.mark.parametrize("scale", [1e-12, 1e4, 1e8])
@pytest.mark.parametrize("logits", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("rank", [1, 3, 12])
def test_extremes_are_solved_or_say_so(scale, logits, rank):
    factor = normal(4, 12, rank, seed=3)
    V = DenseKernel(scale * factor @ factor.mT)
    solved = solve(logits * normal(4, 12), V, ALL)
    assert solved.log_lik.isfinite().all()
    # A V of rank 1 ignores nearly all of a gap, which then need not be small: √(FᵀVF) is only known
    # up to √eps · √scale.
    known = 1e-7 if rank == 1 and scale == 1e8 else 1e-9
    assert (solved.residual <= 1e-9 + known * scale**0.5).all()


def test_not_a_number_is_never_solved():
    logits = normal(2, 5)
    logits[1, 2] = torch.nan
    solved = solve(logits, kernel("dense", 2, 5), ALL)
    assert (solved.residual[0] <= 1e-9).all()
    assert not (solved.residual[1] <= 1e-9).any()


def test_rows_are_solved_for_themselves(monkeypatch):
    widths = torch.logspace(-3, 3, 8).double()
    logits, V = 3 * normal(8, 12), kernel("spectral", 8, 12).scaled(widths)
    expected = solve(logits, V, ALL)
    for keeping in (0.0, 1.0):
        monkeypatch.setattr(newton, "WORTH_KEEPING", keeping)
        found = solve(logits, V, ALL, at_once=5)
        close(found.log_lik, expected.log_lik, 1e-12)
        close(found.residual, expected.residual, 1e-12)


@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen", "low_rank"])
@pytest.mark.parametrize("classes", [3, 70])
def test_inputs_are_cut_to_the_memory(name, classes, monkeypatch):
    model = nn.Linear(4, classes).double()
    posterior, (layer,) = POSTERIORS[name](model), affine_layers(model)
    found = Features(nn.functional.pad(normal(7, 4), (0, 1), value=1.0), 3 * normal(7, classes))

    def sizes(memory):
        return [len(part) for part in of_features(found, posterior, layer, 1.5, memory)]

    assert sizes(None) == [7]
    assert sizes(1) == [1] * 7
    dense = isinstance(posterior.output_kernel(layer, found.inputs[:1]), DenseKernel)
    of_one = 8 * classes * (making.VECTORS + (making.MATRICES * classes if dense else 0))
    assert sizes(3 * of_one) == [3, 3, 1]
    # By default, a share of the free memory is the limit.
    monkeypatch.setattr(making, "UNCUT", 1)
    monkeypatch.setattr(making, "default_budget", lambda device: 2 * of_one)
    assert sizes(None) == [2, 2, 2, 1]
    whole = Problem.joined([*of_features(found, posterior, layer, 1.5, 10**9)])
    parts = Problem.joined([*of_features(found, posterior, layer, 1.5, 1)])
    solver = Linearised(negligible=0.0)
    for one, other in zip(solver.of(whole), solver.of(parts), strict=True):
        close(one, other, 1e-12)


def test_rows_that_cannot_be_solved_are_named():
    logits, V = normal(7, 3), kernel("dense", 7, 3)
    V.matrix[[2, 5]] = torch.nan
    with pytest.raises(acnml.solve.UnsolvedError) as raised:
        Linearised().of(Problem(logits, V))
    assert raised.value.rows == (2, 5)
    assert raised.value.total == 7
    with pytest.raises(acnml.solve.UnsolvedError, match="covariances of the logits are NaN"):
        Problem.of(logits, V)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("classes", [2, 5, 30])
def test_coefficients_are_the_fixed_point(scale, classes):
    logits, root = 3 * normal(4, classes), normal(4, classes, classes + 2, seed=1)
    V, labels = DenseKernel(scale * root @ root.mT / classes), torch.arange(classes)
    u = coefficients(logits, V, labels, Precision(1e-11))
    fixed = torch.eye(classes).double() - (logits[:, None] + V.mv(u)).softmax(-1)
    close(u, fixed, 1e-8)


@pytest.mark.parametrize("lead", [2.0, 5.757080287844746, 12.0, 40.0])
@pytest.mark.parametrize("variance", [0.1, 11.507819863388864, 150.0, 1e5])
def test_newton_does_not_zigzag(lead, variance):
    """Two classes and one logit: z = lead and its posterior variance, at hand in one dimension."""
    logits = torch.tensor([[lead, 0.0]], dtype=torch.float64)
    V = DenseKernel(torch.tensor([[[variance, 0.0], [0.0, 0.0]]], dtype=torch.float64))
    assert solve(logits, V, ALL).residual.max() <= 1e-9
    t = coefficients(logits, V, torch.arange(2))[0, :, 0]  # e_y - p, by the first class
    close(t, torch.tensor([1.0, 0.0]).double() - torch.sigmoid(lead + variance * t))


@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_large_kernels_of_low_rank(scale):
    root = normal(20, 10, 3)
    V = DenseKernel(scale * root @ root.mT)
    assert solve(normal(20, 10, seed=1), V, Precision(1e-5)).residual.max() < 1e-2


def test_far_inputs_are_solved_or_say_so():
    model = nn.Linear(3, 10, bias=False)
    classifier = Classifier(model)
    mean = classifier.copy_parameters(["weight"])
    directions = {"weight": normal(3, 10, 3).float()}
    wide = LowRank(mean, {"weight": torch.full_like(mean["weight"], 1e-6)}, directions)
    assert Acnml(classifier, wide).solve(100 * normal(6, 3).float()).residual.max() < 0.1
    with pytest.raises(ValueError, match="not solved after 1 Newton steps: a residual of"):
        Acnml(classifier, wide, Linearised(newton_steps=1))(100 * normal(6, 3).float())
