"""The linearised network against the network itself, on tiny images."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from acnml import metrics
from cases import normal
from stores import store_in
from studies import linearised
from studies.data import Labelled
from studies.search import near

TINY = linearised.LinearisedStudy(
    hidden=(8,), train=200, validation=20, test=20, angles=(0, 90), epochs=5, seeds=(0,)
)


def digits(count: int = 220) -> Labelled:
    x = normal(count, 16).float().abs()
    return Labelled(x.view(count, 1, 4, 4), x[:, :10].argmax(-1))


@pytest.mark.parametrize("name", linearised.POSTERIORS)
def test_small_knobs_are_the_network_at_the_mean(name):
    data = digits()
    pair = linearised.fitted(name, TINY, data, 0)
    plain = linearised.predictor(linearised.PLAIN, *pair, 0.0)(data.inputs)
    for method in linearised.METHODS:
        torch.testing.assert_close(
            linearised.predictor(method, *pair, 1e-8)(data.inputs), plain, atol=1e-3, rtol=0
        )


def rows(apart: dict[str, tuple[float, ...]]) -> list[linearised.Scored]:
    """Return results in which a method's scores differ from the others' by this much per seed."""
    return [
        linearised.Scored(
            name, seed, method, 1.0, str(angle), 10, 0.5, *[0.3 + angle * change / 90] * 3
        )
        for name in linearised.POSTERIORS
        for method in linearised.METHODS
        for seed, change in enumerate(apart.get(method, (0.0, 0.0, 0.0)))
        for angle in (0, 90)
    ]


def test_differences_are_paired_and_of_rotated_images():
    found = rows({linearised.LINEARISED: (0.1, 0.2, 0.3)})
    quantile = 4.302652729911275  # Student's t with two degrees of freedom
    for score in linearised.SCORES:
        middle, half = linearised.gap(found, linearised.BBP, linearised.BMA, score)
        assert middle == pytest.approx(0.2)
        assert half == pytest.approx(quantile * 0.1 / math.sqrt(3))
    assert (
        linearised.gap(
            rows({linearised.LINEARISED: (0.1,), linearised.BMA: (0.0,)}),
            linearised.BBP,
            linearised.BMA,
            "ece",
        )[1]
        == math.inf
    )


def test_the_verdict_is_only_about_other_ways_to_use_the_network():
    count = len(linearised.POSTERIORS) * len(linearised.RIVALS) * len(linearised.SCORES)
    assert f"worse beyond the 95 % interval in {count} and better in 0" in linearised.verdict(
        rows({linearised.LINEARISED: (0.1, 0.1001, 0.1)})
    )
    assert "in 0 and better in 9" in linearised.verdict(
        rows({next(iter(linearised.RIVALS)): (0.1, 0.1001, 0.1)})
    )
    assert "in 0 and better in 0" in linearised.verdict(rows({linearised.BMA: (0.1, 0.1001, 0.1)}))


def test_a_tiny_study_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(linearised, "load_mnist", lambda part: digits())
    few = {linearised.ASCENT: 10}  # costly: fewer images, and the knob of a cheaper method
    monkeypatch.setattr(type(TINY), "images", lambda own, method: few.get(method, own.test))
    study = replace(TINY, epochs=60)  # otherwise no α is too large, and the paper's steps diverge
    assert linearised.run(study, tmp_path, store_in(tmp_path, study), "the command").exists()
    text = (tmp_path / "results.md").read_text()
    assert all(f"| {method} |" in text for method in linearised.METHODS)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    cases = len(linearised.POSTERIORS) * len(TINY.angles)
    assert len(lines) == 1 + cases * (2 * len(linearised.METHODS) - 1)
    assert sum(f'"{linearised.ASCENT}"' in line for line in lines) == cases


def test_a_search_near_a_value_finds_the_same_knob():
    for start in (1e-4, 0.3, 1.9, 2.1, 50.0):
        assert near(lambda knob: knob, 2.0, start) == pytest.approx(2, rel=1e-3)
    assert near(lambda knob: 1.0, 0.5, 1.0) < 1e-5 < 1e3 < near(lambda knob: 0.0, 0.5, 1.0)


def test_all_knobs_cost_the_same_upright():
    data = digits(60)
    pair = linearised.fitted(linearised.KFAC, replace(TINY, epochs=150), data, 0)
    limit = (
        metrics.nll(linearised.predictor(linearised.PLAIN, *pair, 0.0)(data.inputs), data.labels)
        + 0.01
    )
    for method in linearised.METHODS[1:]:
        knob = linearised.largest(
            lambda knob, method=method: linearised.predictor(method, *pair, knob), data, limit, 1e-4
        )
        nll = metrics.nll(linearised.predictor(method, *pair, knob)(data.inputs), data.labels)
        assert nll == pytest.approx(limit, abs=1e-4)
