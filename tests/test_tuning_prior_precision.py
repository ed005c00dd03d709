"""Choosing the prior precision, against closed forms and scipy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import optimize

from acnml import Bma, Classifier, tuning
from acnml.fit import DiagonalCurvature, fit_curvature
from cases import MODELS, normal
from dense import vector


@pytest.mark.parametrize("h", [0.01, 1.0, 300.0])
def test_evidence_optimum_of_an_isotropic_curvature(h):
    """For H = hI, τ‖θ̂‖² = P h / (h + τ): a quadratic equation for τ."""
    mean = {"w": normal(7, 3), "b": normal(4, seed=1)}
    curvature = DiagonalCurvature(mean, {n: torch.full_like(t, h) for n, t in mean.items()})
    square, count = vector(mean).square().sum().item(), 25
    root = math.sqrt((square * h) ** 2 + 4 * square * count * h)
    expected = (root - square * h) / (2 * square)
    assert tuning.prior_precision_by_evidence(curvature).value == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_evidence_optimum_equals_scipys(structure):
    case = MODELS[2]
    data = [(case.x(20), torch.arange(20) % 3)]
    curvature = fit_curvature(case.model(), data, structure=structure)
    choice = tuning.prior_precision_by_evidence(curvature)
    found = optimize.minimize_scalar(
        lambda u: -curvature.log_evidence(math.exp(u)), bounds=(-10, 10), options={"xatol": 1e-8}
    )
    assert choice.value == pytest.approx(math.exp(found.x), rel=1e-4)
    values = [row.value for row in choice.table]
    assert values == sorted(values)
    assert choice.value in values
    for row in choice.table:
        assert row.log_evidence == curvature.log_evidence(row.value) <= -found.fun + 1e-9


@pytest.mark.parametrize(("structure", "decompositions"), [("kron", 2 * 2), ("full", 1)])
def test_each_matrix_is_decomposed_once(structure, decompositions, monkeypatch):
    """Two factors of two layers, or one matrix, however many prior precisions are tried."""
    case, calls, decompose = MODELS[1], [], torch.linalg.eigvalsh
    data = [(case.x(20), torch.arange(20) % 3)]
    curvature = fit_curvature(case.model(), data, structure=structure)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m: calls.append(m) or decompose(m))
    tuning.prior_precision_by_evidence(curvature)
    assert len(calls) == decompositions


def test_an_evidence_without_a_maximum_is_refused():
    mean = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
    curvature = DiagonalCurvature(mean, {n: torch.ones_like(t) for n, t in mean.items()})
    with pytest.raises(ValueError, match="the evidence is still rising at a prior precision of"):
        tuning.prior_precision_by_evidence(curvature)


def test_the_prior_precision_of_least_nll_is_the_minimum_of_its_sweep():
    case = MODELS[1]
    classifier, data = Classifier(case.model()), [(case.x(9), torch.arange(9) % 3)]
    curvature = fit_curvature(classifier, data, structure="diag")

    def bma(tau: float) -> Bma:
        return Bma(classifier, curvature.posterior(tau), samples=3)

    choice = tuning.least_nll(bma, [10.0, 0.1, 1.0], data)
    assert choice.table == tuning.sweep(bma, [10.0, 0.1, 1.0], data)
    assert min(choice.table, key=lambda row: row.nll).value == choice.value
