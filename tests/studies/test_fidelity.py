"""Retraining reaches CNML's optimum, and distances to it are what they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from acnml.exact import LogisticProblem, cnml, with_intercept
from cases import normal
from stores import twice
from studies.fidelity.report import figure, write_pages
from studies.fidelity.retraining import (
    gauss_newton,
    parameters,
    retrained,
    root_of_inverse,
    train,
)
from studies.fidelity.settings import DIGITS, LOGISTIC, FidelityStudy, Problem
from studies.fidelity.study import collect, distances


def problem(network: nn.Module, precision: float = 1.0):
    """A trained network with its data, three queries and L."""
    x = normal(30, 3)
    labels = (x + 0.5 * normal(30, 3, seed=1)).argmax(-1)
    train(network, x, labels, precision, 1000)
    H = gauss_newton(network, x)
    H = H + precision * torch.eye(len(H)).double()
    return x, labels, normal(3, 3, seed=2) * 2, root_of_inverse(H), H


def test_retraining_is_exact_cnml_for_logistic_regression():
    network = nn.Linear(3, 3).double()
    x, labels, queries, root, _ = problem(network)
    found = retrained(network, x, labels, queries, 1.0, root, 200)
    exact = cnml(LogisticProblem(with_intercept(x), labels, 0.5, 3), with_intercept(queries))
    torch.testing.assert_close(found.log_lik, exact.log_lik, rtol=0, atol=1e-5)
    assert found.residual.max() < 1e-4


def test_retraining_ends_where_the_gradient_of_the_loss_vanishes():
    """By autograd on a network of its own, from scratch weights of the optimum."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, labels, queries, root, _ = problem(network)
    before = {n: t.clone() for n, t in parameters(network).items()}
    found = retrained(network, x, labels, queries, 1.0, root, 300)
    assert all(torch.equal(before[n], t) for n, t in parameters(network).items())
    assert found.residual.max() < 1e-3
    plain = network(queries).detach().log_softmax(-1)
    assert (found.log_lik > plain).all()
    # Train on with the query in the data: its likelihood does not change.
    query, label = queries[1:2], torch.tensor([2])
    train(network, torch.cat([x, query]), torch.cat([labels, label]), 1.0, 2000)
    again = network(query).detach().log_softmax(-1)[0, 2]
    torch.testing.assert_close(found.log_lik[1, 2], again, rtol=0, atol=1e-4)


def test_distances_by_hand():
    cnml_lik = torch.tensor([[0.5, 0.5], [1.0, 0.5]]).double().log()
    labels = torch.tensor([0, 1])
    same = distances(cnml_lik.log_softmax(-1), cnml_lik, cnml_lik, labels)
    assert same["variation"] == same["log_lik_error"] == same["nll_difference"] == 0
    assert same["regret_rank"] == same["confidence_rank"] == pytest.approx(1)
    sure = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).double().log()
    other = distances(sure, None, cnml_lik, labels)
    assert other["variation"] == pytest.approx((0.4 + (0.9 - 2 / 3)) / 2)
    assert other["variation_error"] == pytest.approx(abs(0.4 - (0.9 - 2 / 3)) / 2)
    assert other["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.1)) / 2)
    assert math.isnan(other["regret_error"])
    assert math.isnan(other["confidence_rank"])  # all confidences are equal
    nothing = torch.full_like(sure, math.nan)
    assert math.isnan(distances(nothing, nothing, cnml_lik, labels)["variation"])


def test_a_tiny_study_end_to_end(tmp_path):
    study = FidelityStudy(
        problems=(Problem(LOGISTIC, 40, 0, 1.0), Problem(DIGITS, 40, 2, 1.0)),
        queries=4,
        held_out=60,
        alphas=(1.0,),
        steps=100,
    )
    rows, facts = twice(lambda store: collect(study, store), tmp_path, study)
    page = write_pages(study, rows, facts, tmp_path, "command")
    assert page.exists()
    assert (tmp_path / "fidelity.png").stat().st_size > 10_000
    text = (tmp_path / "results.md").read_text()
    assert "| IF-COMP | EK-FAC | 1 |" in text
    assert len(figure(study, rows).axes) == 2
    own = {(r.method, r.posterior): r for r in rows if r[:2] == (LOGISTIC, "all")}
    assert own["ACNML, linearised", "full"].variation < own["network", ""].variation
