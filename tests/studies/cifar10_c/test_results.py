"""A whole run: everything is measured once, and is what the library's predictors give."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from acnml import Acnml, Linearised, metrics
from stores import made, store_in
from studies.cifar10_c import methods
from studies.cifar10_c.study import build
from studies.engine import choose
from studies.engine.choose import (
    LeastNll,
    WithinPrice,
)
from studies.engine.method import LINEARISED
from studies.engine.predictors import predictor
from studies.engine.study import bins_for
from studies.engine.workshop import Finished, Workshop


def test_everything_is_measured_once(finished, tiny, study):
    out, results = finished
    assert results.missing == ()
    seen = {(row.method.name, row.shift) for row in results.rows}
    steps = [method for method in study.methods if method in methods.COSTLY]
    others = len(study.methods) - len(steps)
    assert tiny.steps_shifts == ("clean", "contrast 5")
    assert len(seen) == others * len(tiny.shifts) + len(steps) * len(tiny.steps_shifts)
    assert len({(row.method, row.shift, row.n) for row in results.rows}) == len(results.rows)
    assert len(made(out)) == len(set(made(out)))


def test_metrics_are_those_of_the_predictor_itself(finished, tiny, study, data):
    """The saved log-probabilities are what the library's predictors give."""
    out, results = finished
    makers = Workshop(study, data, Finished(store_in(out, tiny)), 0)
    for row in (r for r in results.rows if r.shift == "contrast 5"):
        images, labels = data.load("contrast 5", row.n)
        log_probs = predictor(row.method, makers)(makers.prepared(methods.SWA, images))
        found = [row.accuracy, row.nll, row.brier, row.ece]
        expected = [getattr(metrics, s)(log_probs, labels) for s in ("accuracy", "nll", "brier")]
        expected.append(metrics.ece(log_probs, labels, bins_for(row.n, tiny.bins)))
        assert found == pytest.approx(expected, abs=1e-4), row.method.name


def test_acnml_with_kfac_has_the_posterior_of_the_best_average(finished, tiny, study, data):
    """The covariance has BMA's chosen scale, and α is applied on top."""
    out, results = finished
    makers = Workshop(study, data, Finished(store_in(out, tiny)), 0)
    chosen = {row.method.name: row.method for row in results.rows}
    ours = predictor(chosen[methods.ACNML_KFAC_PAPERS.name], makers)
    average = predictor(chosen[methods.BMA_KFAC.name], makers)
    alpha = chosen[methods.ACNML_KFAC_PAPERS.name].value
    solver = Linearised("network")
    expected = Acnml(average.classifier, average.posterior, solver, alpha, on_unsolved="ignore")
    x = makers.prepared(methods.SWA, data.load("contrast 5", 3).inputs)
    torch.testing.assert_close(ours(x), expected(x))


def test_agreement_is_the_mean_total_variation(finished, tiny, study, data):
    out, results = finished
    makers = Workshop(study, data, Finished(store_in(out, tiny)), 0)
    found = results.agreements[0]
    fast = replace(found.method, solver=LINEARISED)
    distances = []
    for shift in tiny.steps_shifts:
        inputs = makers.prepared(methods.SWA, data.load(shift, 5).inputs)
        pair = [predictor(method, makers)(inputs).exp() for method in (found.method, fast)]
        distances.append((pair[0] - pair[1]).clamp(min=0).sum(1))
    assert found.inputs == 5 * len(tiny.steps_shifts)
    assert found.total_variation == pytest.approx(torch.cat(distances).mean().item(), abs=1e-5)


def test_an_ensemble_can_be_the_networks_of_all_seeds(tiny, tmp_path):
    """Three seeds then need three networks, not nine."""
    seeds = build(replace(tiny, model="fresh", members=0, seeds=(0, 1, 2), only_papers=True))
    data = seeds.load(tmp_path)
    asked: list[int] = []

    class Named:
        def make(self, stage, function):
            asked.append(stage.seed)
            return SimpleNamespace(stage=stage, facts={})

    shop = Workshop(seeds, data, Named(), 1)
    assert len(seeds.grounds[methods.ENSEMBLE].artefacts(methods.SWA_ENSEMBLE, shop)) == 3
    assert set(asked) == {0, 1, 2}
    assert methods.MAP_SGD not in seeds.methods
    assert methods.SGD not in seeds.networks


@pytest.mark.parametrize(
    ("limit", "note"), [(0.35, ""), (0.302, ""), (0.3005, ""), (0.29, "none is in budget")]
)
def test_a_temperature_costs_what_it_is_matched_with(monkeypatch, limit, note):
    """Also if no temperature of the grid is as cheap. If none is at all, it costs the least."""
    best = 1.9

    def nll(temperature):
        return 0.3 + (math.log(temperature) - math.log(best)) ** 2

    monkeypatch.setattr(choose, "least_nll", lambda _: LeastNll(best, nll(best)))
    monkeypatch.setattr(
        choose, "held_out", lambda method, _: SimpleNamespace(nll=nll(method.value))
    )
    grid = (6.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.25, 1.0)
    study = SimpleNamespace(values=lambda _: grid, plain=methods.MAP_SWA)
    rule = WithinPrice(0.0, lambda _: limit)
    chosen = rule.choose(methods.TEMPERED_MATCHED, SimpleNamespace(study=study))
    assert chosen.note == note
    if note:
        assert chosen.method.value == best
    else:
        assert chosen.method.value > best
        assert nll(chosen.method.value) == pytest.approx(limit, rel=0.05)
