"""Last layers with many classes: the fast paths against scipy and against Newton in all classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize
from scipy.special import lambertw, log_softmax
from torch import nn

from acnml import Classifier, Linearised
from acnml._algebra.kernels import DenseKernel, DiagonalKernel, Kernel, ScaledKernel, SpectralKernel
from acnml._algebra.newton import solve_logits
from acnml.head import independent, merged
from acnml.head import solver as head
from acnml.head.independent import solve_independent
from acnml.head.merged import Merged
from acnml.head.solver import Precision, Shared, solve_head
from cases import POSTERIORS, normal

BATCH = 2


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def covariance(classes: int, coupling: float) -> torch.Tensor:
    """A covariance with unit-sized variances, whose classes depend on each other as told."""
    root = torch.eye(classes).double() + coupling * normal(classes, classes, seed=4) / classes**0.5
    return root @ root.T


def kernel(kind: str, classes: int, width: float, coupling: float = 0.3) -> Kernel:
    scale = width * normal(BATCH, seed=3).exp()
    values, basis = torch.linalg.eigh(covariance(classes, coupling))
    return {
        "diagonal": DiagonalKernel(width * normal(BATCH, classes, seed=2).exp()),
        "scaled": ScaledKernel(covariance(classes, coupling), scale),
        "spectral": SpectralKernel(basis, scale[:, None] * values),
        "dense": DenseKernel(scale[:, None, None] * covariance(classes, coupling)),
    }[kind]


def by_newton(logits, V, labels, tolerance=1e-10):
    """Log-likelihoods of labels, by Newton steps in all classes."""
    solved = solve_logits(logits, V, labels, tolerance, 200)
    assert solved.residual.max() <= tolerance
    index = labels.expand(len(logits), -1).unsqueeze(-1)
    return solved.log_probs.gather(-1, index).squeeze(-1)


# Logits and variances of independent classes that are in some way extreme.
EXTREME = {
    "ordinary": (3.0, 1.0),
    "narrow": (3.0, 1e-4),
    "wide": (3.0, 40.0),
    "no variance": (3.0, 0.0),
    "equal logits": (0.0, 2.0),
    "huge logits": (300.0, 5.0),
}


@pytest.mark.parametrize("case", EXTREME)
@pytest.mark.parametrize("classes", [2, 7, 65, 200])
@pytest.mark.parametrize("tolerance", [1e-5, 1e-10])
def test_independent_labels_are_newtons(case, classes, tolerance, monkeypatch):
    monkeypatch.setattr(head, "FEW_CLASSES", 1)
    spread, width = EXTREME[case]
    logits, var = spread * normal(BATCH, classes, seed=1), width * normal(BATCH, classes).exp()
    var[:, 0] = 0  # a class that does not adapt
    alone = solve_independent(logits, var, tolerance)
    assert case == "wide" or (alone.residual <= tolerance).all()  # else Newton has to help
    V = DiagonalKernel(var)
    solved = solve_head(logits, V, Precision(tolerance, 100, 0.0), at_once=50)
    assert (solved.residual <= tolerance).all()
    expected = by_newton(logits, V, torch.arange(classes))
    close(solved.log_lik, expected, 30 * tolerance)


def test_independent_labels_by_lamberts_function():
    logits, var = 2 * normal(1, 5, seed=1), normal(1, 5, seed=2).exp()
    z, d = logits[0].numpy(), var[0].numpy()

    def probabilities(L, y):
        return lambertw(d * np.exp(z - L + d * (np.arange(5) == y))).real / d

    found = solve_independent(logits, var, 1e-12).log_lik[0]
    for y in range(5):
        L = brentq(lambda L, y=y: probabilities(L, y).sum() - 1, -50, 50, xtol=1e-13)
        close(found[y].item(), np.log(probabilities(L, y)[y]), 1e-10)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("error", [1.0, 1e-2, 1e-7])
def test_a_table_is_as_exact_as_it_says(seed, error):
    logits = 3 * normal(BATCH, 30, seed=seed)
    var = 10.0 ** (seed % 4 - 1) * normal(BATCH, 30, seed=seed + 10).exp()
    table = independent._table(logits, var, error)
    span = table.spacing * table.pieces.shape[1]
    L = table.left + span * torch.linspace(0, 1, 997).double()
    piece, t = independent._locate(table, L)
    powers = t.unsqueeze(-1) ** torch.arange(6)
    found = (table.pieces.gather(1, piece.unsqueeze(-1).expand(-1, -1, 6)) * powers).sum(-1)
    a = (logits.unsqueeze(1) - L.unsqueeze(2)).numpy()
    d = var.unsqueeze(1).numpy()
    exact = torch.from_numpy((lambertw(d * np.exp(a)).real / d).sum(-1))
    assert ((found - exact).abs() <= table.error.gather(1, piece) + 1e-12).all()


def test_a_table_that_is_too_coarse_is_noticed(monkeypatch):
    logits, V = 3 * normal(BATCH, 70, seed=1), kernel("diagonal", 70, 10.0)
    precise = Precision(1e-9, 100, 0.0)
    expected = solve_head(logits, V, precise, at_once=9)
    monkeypatch.setattr(independent, "MOST_NODES", 3)
    assert not (solve_independent(logits, V.var, 1e-9).residual <= 1e-9).all()
    found = solve_head(logits, V, precise, at_once=9)
    assert (found.residual <= 1e-9).all()
    close(found.log_lik, expected.log_lik, 1e-7)


@pytest.mark.parametrize("kind", ["scaled", "spectral", "dense"])
@pytest.mark.parametrize("width", [0.0, 0.05, 1.0, 20.0])
@pytest.mark.parametrize(("classes", "tolerance"), [(65, 1e-9), (65, 1e-5), (200, 1e-5)])
def test_merged_classes_give_newtons_solution(kind, width, classes, tolerance):
    logits, V = 4 * normal(BATCH, classes, seed=1), kernel(kind, classes, width)
    solved = solve_head(logits, V, Precision(tolerance, 100, 0.0), at_once=50)
    assert (solved.residual <= tolerance).all()
    assert (solved.omitted == 0).all()
    labels = torch.arange(classes)[:: classes // 40]
    expected = by_newton(logits, V, labels)
    close(solved.log_lik[:, labels], expected, 30 * tolerance)


@pytest.mark.parametrize("logits", [0.0, 300.0])
def test_merged_classes_with_extreme_logits(logits):
    logits, V = logits * normal(BATCH, 80, seed=1), kernel("scaled", 80, 1.0)
    solved = solve_head(logits, V, Precision(1e-6, 100, 0.0), at_once=80)
    assert (solved.residual <= 1e-6).all()
    close(solved.log_lik, by_newton(logits, V, torch.arange(80)), 1e-5)


@pytest.mark.parametrize("coupling", [0.1, 1.0])
def test_merged_classes_maximise_the_objective(coupling, monkeypatch):
    """The objective of `acnml._algebra.newton`, maximised by scipy."""
    monkeypatch.setattr(head, "FEW_CLASSES", 4)
    logits, V = 2 * normal(BATCH, 9, seed=1), kernel("dense", 9, 2.0, coupling)
    found = solve_head(logits, V, Precision(1e-9, 100, 0.0), at_once=9).log_lik[0]
    z, matrix = logits[0].numpy(), V.dense()[0].numpy()
    for y in range(9):

        def loss(u, y=y):
            gap = (np.arange(9) == y) - np.exp(log_softmax(z + matrix @ u)) - u
            return u @ matrix @ u / 2 - log_softmax(z + matrix @ u)[y], -matrix @ gap

        u = minimize(loss, np.zeros(9), jac=True, tol=1e-14, options={"gtol": 1e-10}).x
        close(found[y].item(), log_softmax(z + matrix @ u)[y], 1e-7)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("single", [False, True])
def test_the_residual_of_merged_classes_is_none_too_small(seed, single, monkeypatch):
    monkeypatch.setattr(merged, "LIKELY", 2 + 3 * seed)  # so few that the step has much to do
    width, coupling = 10.0 ** (seed % 3 - 1), [0.05, 0.3][seed % 2]
    logits, V = 3 * normal(1, 70, seed=seed), kernel("dense", 70, width, coupling).take(slice(1))
    shared, labels = Shared.of(logits, V), torch.arange(70)
    kernel_used = shared.single if single else V
    rough = Merged.of(logits, kernel_used, shared.var, shared.norms, shared.p)
    step = rough.put_right(labels, rough.solve(labels, 1e-5))
    exact = solve_logits(logits, V, labels, 1e9, 1, step.coefficients.double()[None])
    assert (exact.residual[0] <= step.residual).all()
    off = (exact.log_probs[0].diagonal() - step.log_lik).abs()
    assert (off <= 10 * (1 + width) ** 0.5 * step.residual).all()


@pytest.mark.parametrize("kind", ["scaled", "spectral", "dense"])
@pytest.mark.parametrize("seed", range(4))
def test_labels_left_out_add_no_more_than_their_bound(kind, seed):
    logits = (3 + seed) * normal(BATCH, 90, seed=seed)
    V = kernel(kind, 90, 0.1 * 3.0**seed, coupling=0.1 * (1 + seed))
    exact = solve_head(logits, V, Precision(1e-7, 100, 0.0), at_once=90)
    pruned = solve_head(logits, V, Precision(1e-7, 100, 0.02), at_once=90)
    gain = exact.log_lik.exp() - pruned.log_lik.exp()
    assert (pruned.omitted.sum(-1) <= 0.02).all()
    assert (gain <= pruned.omitted + 1e-6).all()
    assert (gain >= -1e-6).all()


@pytest.mark.parametrize("kind", ["scaled", "spectral", "dense"])
def test_no_label_may_matter(kind):
    logits, V = 4 * normal(BATCH, 70, seed=1), kernel(kind, 70, 0.0)
    solved = solve_head(logits, V, Precision(1e-5, 50, 1e-3), at_once=70)
    assert (solved.omitted > 0).all()
    close(solved.log_lik, logits.log_softmax(-1), 1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "scaled", "spectral"])
def test_a_thousand_classes(kind):
    logits, V = 4 * normal(BATCH, 1000, seed=1), kernel(kind, 1000, 1.0, coupling=0.05)
    solved = solve_head(logits, V, Precision(1e-5, 50, 1e-3), at_once=400)
    matter = solved.omitted == 0
    assert solved.residual[matter].max() <= 1e-5
    labels = solved.log_lik.topk(12).indices
    precise = solve_logits(logits, V, labels, 1e-9, 100)
    expected = precise.log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    close(solved.log_lik.gather(1, labels), expected, 1e-4)


@pytest.mark.parametrize("name", ["diagonal", "kronecker_factors", "kronecker_eigen"])
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
