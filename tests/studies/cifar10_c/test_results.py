"""A whole run: everything is measured once, and is what the library's predictors give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from studies.cifar10_c.choices import explained
from studies.cifar10_c.jobs import phases
from studies.cifar10_c.methods import methods_of
from studies.cifar10_c.plan import plan
from studies.cifar10_c.predictors import predictor
from studies.cifar10_c.results import blurred_shifts
from studies.cifar10_c.workshop import Workshop
from studies.study.artefacts import Finished

from acnml import metrics
from stores import made, store_in
from studies.cifar10_c import methods


def test_everything_is_measured_once(finished, tiny):
    out, results = finished
    assert results.missing == ()
    seen = {(row.method.name, row.shift) for row in results.rows}
    assert len(seen) == len(methods_of(tiny)) * len(tiny.shifts)
    assert len({(row.method, row.shift, row.n) for row in results.rows}) == len(results.rows)
    assert len(made(out)) == len(set(made(out)))


def test_the_plan_counts_the_stages_that_are_made(finished, tiny):
    out, _ = finished
    lines = {line.kind: line for line in plan(tiny)}
    predicted = [name for name in made(out) if name.startswith(("predict", "try", "sweep"))]
    assert sum(lines[phase.title].stages for phase in phases(tiny)) == len(predicted)
    renewed = [name for name in made(out) if name.startswith("renew")]
    assert lines["renewing batch norm"].stages == len(renewed)
    fitted = [name for name in made(out) if name.startswith("fit KFAC")]
    assert lines["fitting KFAC"].stages == len(fitted)


def test_metrics_are_those_of_the_predictor_itself(finished, tiny, data):
    """The saved log-probabilities are what the library's predictors give."""
    out, results = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    for row in (r for r in results.rows if r.shift == "contrast 5"):
        images, labels = data.shifted("contrast 5", row.n)
        log_probs = predictor(row.method, makers)(makers.inputs(images))
        found = [row.accuracy, row.nll, row.brier, row.ece]
        expected = [getattr(metrics, s)(log_probs, labels) for s in ("accuracy", "nll", "brier")]
        expected.append(metrics.ece(log_probs, labels, tiny.bins))
        assert found == pytest.approx(expected, abs=1e-4), row.method.name


def test_agreement_is_the_mean_total_variation(finished, tiny, data):
    out, results = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    found = results.agreements[0]
    fast = replace(found.method, solver=methods.LINEARISED)
    distances = []
    for shift in tiny.shifts:
        inputs = makers.inputs(data.shifted(shift, 5).images)
        pair = [predictor(method, makers)(inputs).exp() for method in (found.method, fast)]
        distances.append((pair[0] - pair[1]).clamp(min=0).sum(1))
    assert found.images == 5 * len(tiny.shifts)
    assert found.total_variation == pytest.approx(torch.cat(distances).mean().item(), abs=1e-5)


def test_a_mean_waits_for_all_seeds(finished):
    """While a second seed is missing, there is nothing to compare."""
    _, results = finished
    where = methods.MAP_SWA, "ece", "clean", 10
    assert len(results.values(*where)) == 1
    assert replace(results, study=replace(results.study, seeds=(0, 1))).values(*where) == []


def test_diagrams_are_of_severities_that_the_study_sees(tiny):
    blurred = blurred_shifts(replace(tiny, severities=(5, 4), blurred=(5, 3)))
    assert blurred == ["clean", "gaussian_blur 5"]


def test_a_budget_that_nothing_keeps_is_said(finished, tiny, data):
    out, _ = finished
    strict = replace(tiny, choice=replace(tiny.choice, tolerance=-100.0))
    makers = Workshop(strict, data, Finished(store_in(out, strict)), 0)
    assert explained(methods.ACNML_HEAD, makers).note == "none is in budget"
