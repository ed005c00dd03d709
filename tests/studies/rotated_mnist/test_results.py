"""A whole run: everything is measured once, and is what the library's predictors give."""

from __future__ import annotations

import pytest

from acnml import metrics
from stores import made, store_in
from studies.engine.predictors import predictor
from studies.engine.study import bins_for
from studies.engine.workshop import Finished, Workshop
from studies.rotated_mnist import methods
from studies.rotated_mnist.methods import FAMILIES, METHODS

from .tiny import TINY


def test_everything_is_measured_once(finished):
    out, results = finished
    assert results.missing == ()
    assert len({(row.method, row.shift) for row in results.rows}) == len(METHODS) * len(TINY.shifts)
    assert len({(row.method, row.shift, row.n) for row in results.rows}) == len(results.rows)
    assert len(made(out)) == len(set(made(out)))
    assert len(results.sweep) == 2 * len(FAMILIES)


def test_metrics_are_those_of_the_predictor_itself(finished, study, data):
    """The saved log-probabilities are what the library's predictors give."""
    out, results = finished
    workshop = Workshop(study, data, Finished(store_in(out, TINY)), 0)
    for row in (r for r in results.rows if r.shift == "90°" and r.method.rule != "MC dropout"):
        images, labels = data.load("90°", row.n)
        log_probs = predictor(row.method, workshop)(images)
        expected = metrics.summary(log_probs, labels, bins_for(row.n, study.bins))
        found = {name: getattr(row, name) for name in expected}
        assert found == pytest.approx(expected, abs=1e-4), row.method.name


def test_methods_are_compared_on_the_same_images(finished):
    """Those that see more are scored on the first of them as well, which all have seen."""
    _, results = finished
    shared = results.inputs(methods.CHEAP)
    assert shared < results.inputs([methods.MAP])
    for method in methods.CHEAP:
        assert len(results.values(method, "ece", "90°", shared)) == 1, method.name
