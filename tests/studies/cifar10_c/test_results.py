"""A whole run: all is measured once, is what the library's predictors give, and is judged."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Linearised, metrics
from stores import collected, made
from studies.cifar10_c import methods
from studies.engine import choose
from studies.engine.choose import LeastNll, SweepPoint, WithinPrice
from studies.engine.claims import matched_gaps, verdicts
from studies.engine.figures import bootstrap_median
from studies.engine.method import LINEARISED, Method
from studies.engine.predictors import predictor, solved_or_uniform
from studies.engine.report import write_report
from studies.engine.results import Row
from studies.engine.study import bins_for


def judged(results, word):
    return [v.holds for v in verdicts(results) if word in v.claim]


def test_everything_is_measured_once(finished, tiny):
    results, study = finished.results, finished.study
    assert results.missing == ()
    seen = {(row.method.name, row.shift) for row in results.rows}
    steps = [method for method in study.methods if method in methods.COSTLY]
    others = len(study.methods) - len(steps)
    assert tiny.steps_shifts == ("clean", "contrast 5")
    assert len(seen) == others * len(tiny.shifts) + len(steps) * len(tiny.steps_shifts)
    assert len({(row.method, row.shift, row.n) for row in results.rows}) == len(results.rows)
    assert len(made(finished.out)) == len(set(made(finished.out)))


def test_metrics_are_those_of_the_predictor_itself(finished, tiny):
    """The saved log-probabilities are what the library's predictors give."""
    makers = finished.workshop()
    for row in (r for r in finished.results.rows if r.shift == "contrast 5"):
        images, labels = finished.data.load("contrast 5", row.n)
        log_probs = predictor(row.method, makers)(makers.prepared(methods.SWA, images))
        found = [row.accuracy, row.nll, row.brier, row.ece]
        expected = [getattr(metrics, s)(log_probs, labels) for s in ("accuracy", "nll", "brier")]
        expected.append(metrics.ece(log_probs, labels, bins_for(row.n, tiny.bins)))
        assert found == pytest.approx(expected, abs=1e-4), row.method.name


def test_acnml_with_kfac_has_the_posterior_of_the_best_average(finished):
    """The covariance has BMA's chosen scale, and α is applied on top."""
    makers = finished.workshop()
    chosen = {row.method.name: row.method for row in finished.results.rows}
    ours = predictor(chosen[methods.ACNML_KFAC_PAPERS.name], makers)
    average = predictor(chosen[methods.BMA_KFAC.name], makers)
    alpha = chosen[methods.ACNML_KFAC_PAPERS.name].value
    solver = Linearised("network")
    expected = Acnml(average.classifier, average.posterior, solver, alpha, on_unsolved="ignore")
    x = makers.prepared(methods.SWA, finished.data.load("contrast 5", 3).inputs)
    torch.testing.assert_close(ours(x), expected(x))


def test_agreement_is_the_mean_total_variation(finished, tiny):
    makers, found = finished.workshop(), finished.results.agreements[0]
    fast = replace(found.method, solver=LINEARISED)
    distances = []
    for shift in tiny.steps_shifts:
        inputs = makers.prepared(methods.SWA, finished.data.load(shift, 5).inputs)
        pair = [predictor(method, makers)(inputs).exp() for method in (found.method, fast)]
        distances.append((pair[0] - pair[1]).clamp(min=0).sum(1))
    assert found.inputs == 5 * len(tiny.steps_shifts)
    assert found.total_variation == pytest.approx(torch.cat(distances).mean().item(), abs=1e-5)


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


def linear_acnml(scale: float) -> Acnml:
    with acnml._util.torch_state.seeded(0):
        layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    classifier = acnml.Classifier(layers)
    var = {name: torch.full_like(p, scale) for name, p in classifier.parameters.items()}
    posterior, solver = acnml.Diagonal(classifier.parameters, var), acnml.Gradient(5, 0.5)
    return Acnml(classifier, posterior, solver, on_unsolved="ignore")


def test_images_without_a_solution_are_counted_and_uniform():
    """A step that is far too long diverges for inputs that are not zero."""
    images = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    saved = solved_or_uniform(linear_acnml(1e30), images)
    assert saved["unsolved"].tolist() == [1, 1]
    assert saved["log_lik"].tolist() == [[0, 0], [0, 0]]
    fine = linear_acnml(0.1)
    saved = solved_or_uniform(fine, images)
    assert saved["unsolved"].tolist() == [0, 0]
    torch.testing.assert_close(saved["log_lik"].log_softmax(1), fine(images))
    with pytest.raises(ValueError, match="the model failed on inputs"):
        solved_or_uniform(fine, torch.zeros(2, 5))


# Reports and verdicts ----------------------------------------------------------------------------


def test_a_report_of_an_unfinished_run_shows_what_there_is(finished, tmp_path):
    """As if it had been killed after severity 5: that is there, severity 4 is named as missing."""
    kept = tmp_path / "artefacts"
    shutil.copytree(finished.out / "artefacts", kept)
    for folder in [*kept.glob("predict-acnml*contrast-4*"), *kept.glob("sweep-acnml*")]:
        shutil.rmtree(folder)
    results = collected(finished.study, finished.data, tmp_path)
    ours = methods.ACNML_SWAG_D_PAPERS
    whole = finished.results.each(ours, "ece", ["contrast 5"], 10)
    assert results.each(ours, "ece", ["contrast 5"], 10) == whole != []
    assert results.each(ours, "ece", ["contrast 4"], 10) == []
    assert any("contrast 4" in name for name in results.missing)
    page = write_report(results, tmp_path).read_text()
    assert "Not finished" in page
    assert "The study is not finished" in page
    assert judged(results, "with SWAG-D has a lower ECE") == [None]
    assert None not in judged(results, "In distribution")


def test_the_bootstrap_of_a_median():
    assert bootstrap_median([0.5] * 15) == (0.5, 0.5, 0.5)
    middle, low, high = bootstrap_median([float(i) for i in range(15)])
    assert middle == 7
    assert 2 <= low < 7 < high <= 12


def made_up(results, eces, clean=None, severities=(5, 4)):
    """Results in which methods have these ECEs at all corruptions, and clean scores of 0.5."""
    n, rows = results.data.count(results.study.settings.images.network_wide), []
    for method, ece in eces.items():
        accuracy, nll = (clean or {}).get(method, (0.5, 0.5))
        for shift in ("clean", *(f"contrast {s}" for s in severities)):
            row = Row(method, 0, shift, n, accuracy, nll, 0.1, ece)
            rows += [row, row._replace(n=12)]
    return replace(results, rows=tuple(rows), sweep=(), agreements=())


SWAG_D = (methods.MAP_SWA, methods.BMA_SWAG_D, methods.ACNML_SWAG_D_PAPERS)
LOWER = "with SWAG-D has a lower ECE"


@pytest.mark.parametrize(
    ("eces", "holds"),
    [((0.3, 0.2, 0.1), True), ((0.3, 0.1, 0.2), False), ((0.1, 0.3, 0.2), False)],
)
def test_the_ece_under_corruption_is_judged_against_both(finished, eces, holds):
    results = made_up(finished.results, dict(zip(SWAG_D, eces, strict=True)))
    assert judged(results, LOWER) == [holds]
    assert judged(results, "with KFAC-Laplace has a lower ECE") == [None]
    (text,) = (v.measured for v in verdicts(results) if LOWER in v.claim)
    for label, other in zip(("SWA", "SWAG-D"), eces, strict=False):
        won = int(eces[2] < other)
        assert f"lower than {label} for {won} / {won} of 1" in text
    half = made_up(finished.results, dict(zip(SWAG_D, eces, strict=True)), severities=(5,))
    assert judged(half, LOWER) == [None]


@pytest.mark.parametrize(
    ("accuracy", "nll", "holds"),
    [(0.9, 0.3, [True, True]), (0.894, 0.3, [False, True]), (0.9, 0.36, [True, False])],
)
def test_clean_scores_are_judged_against_the_better(finished, accuracy, nll, holds):
    clean = dict(zip(SWAG_D, ((0.9, 0.5), (0.8, 0.3), (accuracy, nll)), strict=True))
    results = made_up(finished.results, dict.fromkeys(SWAG_D, 0.1), clean)
    assert judged(results, "In distribution, ACNML with SWAG-D") == holds


def test_families_are_compared_on_their_cautious_branches(finished):
    """A temperature passes each NLL twice; only the cautious passage counts."""

    def points(method: Method, path):
        return [
            SweepPoint(method.family, method.at(v), n, {"contrast 5": e}, {"contrast 5": 1.0})
            for v, n, e in path
        ]

    # NLL falls from T = 1 to T = 2 and rises again; at NLL 0.15 the cautious ECE is 0.35.
    tempered = points(methods.TEMPERED, [(4, 0.2, 0.3), (2, 0.1, 0.4), (1, 0.15, 0.9)])
    head = points(methods.ACNML_HEAD, [(1, 0.15, 0.3), (100, 0.1, 0.4)])
    swept = replace(finished.results, sweep=(*tempered, *head))
    gaps = matched_gaps(swept, methods.ACNML_HEAD, methods.TEMPERED, average=True)
    assert gaps == {"": pytest.approx([-0.05, 0.0])}
    assert judged(swept, "ACNML, last layer does more") == [True]
    assert matched_gaps(swept, methods.ACNML_KFAC, methods.TEMPERED) == {}
