"""Choices on validation images: the most cautious value in budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from acnml import metrics
from stores import store_in
from studies.engine.choose import chosen, most_cautious
from studies.engine.method import CONVERGED, PAPER_STEPS, Method
from studies.engine.predictors import predictor
from studies.engine.workshop import Finished, Workshop
from studies.rotated_mnist import methods

from .tiny import TINY


def test_choices_are_made_on_validation_images(finished, study, data):
    """The library's predictors, on these images alone, lead to the same choice."""
    out, _ = finished
    workshop = Workshop(study, data, Finished(store_in(out, TINY)), 0)

    def nll(method: Method) -> float:
        images, labels = data.held_out
        return metrics.nll(predictor(method, workshop)(images), labels)

    budget = nll(methods.MAP) + TINY.choice.tolerance
    for method in (methods.TEMPERED, methods.ACNML_HEAD, methods.ACNML_KFAC, methods.BMA_KFAC):
        values = study.values(method)
        expected = most_cautious(values, [nll(method.at(value)) for value in values], budget)
        assert chosen(method, workshop).value == pytest.approx(expected, rel=1e-2)
    for solver in (PAPER_STEPS, CONVERGED):
        solved = replace(methods.ACNML_KFAC, solver=solver)
        assert chosen(solved, workshop).value == chosen(methods.ACNML_KFAC, workshop).value
