"""The study about decisions: its estimates and thresholds by hand, and its data."""

from __future__ import annotations

import math

import torch

from acnml.decisions import Outcomes
from studies.decisions.abstain import plug_in
from studies.decisions.digits import shifted
from studies.decisions.methods import difference, thresholded
from studies.decisions.report import KINDS, Found, _plain


def known() -> Outcomes:
    """Ten predictions with confidences 0.05, 0.15, ..., 0.95; the surest seven are right."""
    confidence = torch.arange(10) / 10 + 0.05
    label = torch.zeros(10).long()
    return Outcomes.of(label, (confidence < 0.3).long(), confidence, confidence, confidence)


def test_estimates_of_the_accuracy():
    own = known()
    assert thresholded(own.confidence, own) == 0.7
    assert thresholded(own.confidence - 0.2, own) == 0.5
    assert math.isclose(difference(own.confidence - 0.2, own), 0.5, rel_tol=1e-6)


def test_the_plug_in_threshold_is_the_lowest():
    own = known()
    assert math.isclose(plug_in(own.confidence, own.correct, 0.0), 0.35, rel_tol=1e-6)
    assert math.isclose(plug_in(own.confidence, own.correct, 0.3), 0.05, rel_tol=1e-6)
    assert plug_in(own.confidence, ~own.correct, 0.2) == math.inf


def test_shifts_are_the_same_again():
    images = torch.rand(3, 1, 28, 28)
    for shift in ("clean", "30°", "noise 0.3"):
        first = shifted(images, shift)
        assert torch.equal(first, shifted(images, shift))
        assert torch.equal(first, images) == (shift == "clean")


def test_rows_survive_being_stored():
    row = KINDS["alarms"]("stream", "test", 100, 200, math.nan, False, math.nan)
    found = Found()
    found.add({"alarms": [_plain(row)]})
    again = found.rows["alarms"][0]
    assert again[:4] == row[:4]
    assert math.isnan(again.delay)
