"""The engine itself: choices by hand, and a study of rows with a rule and a choice of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from acnml import metrics
from acnml.predictors import Predictor
from stores import Whole
from studies.data import Labelled
from studies.engine import method as m
from studies.engine.choose import ByLeastNll, most_cautious
from studies.engine.grounds import Networks, Pair
from studies.engine.method import Method, Share
from studies.engine.report import write_report
from studies.engine.run import plan
from studies.engine.study import Model, Network, Plan, Study, StudyData
from studies.engine.workshop import Workshop
from studies.training import Descent


@dataclass(frozen=True)
class Rows:
    training: Descent = Descent(epochs=5, batch_size=20, learning_rate=0.2)


def rows(count: int, seed: int) -> Labelled:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return Labelled(x, (x.sum(1) > 0).long())


MAP = Method(m.MAP, "network")
CAUTIOUS = Method("distance-aware", "network", "", "strength", None, "least")


class DistanceAware:
    """Divides logits by 1 + strength × the distance from the origin."""

    def __init__(self, classifier, strength: float) -> None:
        self.classifier, self.strength = classifier, strength

    def __call__(self, x: Tensor) -> Tensor:
        scale = 1 + self.strength * x.norm(dim=1, keepdim=True)
        return (self.classifier.logits(x) / scale).log_softmax(1)


def distance_aware(pair: Pair, method: Method, workshop: Workshop) -> Predictor:
    assert method.value is not None
    return DistanceAware(pair.classifier, method.value)


def build(settings: Rows) -> Study:
    test = rows(50, 2)

    def load(shift: str, count: int) -> Labelled:
        inputs, labels = test.first(count)
        return Labelled(inputs * float(shift), labels)

    return Study(
        name="rows",
        title="Rows",
        settings=settings,
        load=lambda _: StudyData.of("Made up.", rows(60, 0), rows(40, 1), test, load),
        networks={"network": Network(Model("linear", lambda: nn.Linear(4, 2)), settings.training)},
        grounds={"network": Networks("network")},
        methods=(MAP, CAUTIOUS),
        plain=MAP,
        shifts=("1", "3"),
        share=lambda method, shift: Share(50, 16),
        plan=Plan(60, 40, 50),
        seeds=(0, 1),
        grids={"strength": (0.1, 1.0)},
        choices={"least": ByLeastNll()},
        rules={"distance-aware": distance_aware},
    )


def test_a_study_of_rows_with_a_rule_of_its_own(tmp_path):
    whole = Whole.run(build(Rows()), tmp_path)
    data, results, workshop = whole.data, whole.results, whole.workshop(seed=1)
    assert results.missing == ()
    assert len(results.rows) == 2 * 2 * 2  # methods, shifts, seeds
    classifier = workshop.classifier("network", workshop.weights("network"))
    held_out, (inputs, labels) = data.held_out, data.load("3", 50)
    nlls = {
        value: metrics.nll(DistanceAware(classifier, value)(held_out.inputs), held_out.labels)
        for value in (0.1, 1.0)
    }
    best = min(nlls, key=lambda value: nlls[value])
    expected = metrics.nll(DistanceAware(classifier, best)(inputs), labels)
    (found,) = [
        r for r in results.rows if (r.method, r.seed, r.shift) == (CAUTIOUS.at(best), 1, "3")
    ]
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert "distance-aware" in write_report(results, tmp_path).read_text()
    assert sum(line.stages for line in plan(whole.study)) == 2 * (1 + 3 + 4)


@pytest.mark.parametrize(
    ("nlls", "value"),
    [
        ([0.1, 0.1, 0.1], 1.0),  # the first is within the limit
        ([0.2, 0.3, 0.3], 1.0),
        ([0.4, 0.2, 0.1], 10.0),  # one meets the limit exactly
        ([0.4, 0.1, 0.1], 3.162),  # 0.4 and 0.1 are equally far from 0.2 in logarithms
        ([0.9, 0.4, 0.1], 31.62),
        ([0.4, 0.1, 0.9], 3.162),  # overconfident at the end
        ([math.inf, 0.1, 0.1], 10.0),
        ([0.4, 0.0, 0.1], 10.0),
    ],
)
def test_the_most_cautious_value_by_hand(nlls, value):
    assert most_cautious([1, 10, 100], nlls, 0.2) == value


@pytest.mark.parametrize("limit", [0.11, 0.15, 0.3, 0.39])
def test_log_nll_is_interpolated_linearly_in_the_logarithm(limit):
    """For an NLL that is a power of the value, the interpolation is exact."""
    values = [1.0, 4.0, 9.0]
    found = most_cautious(values, [0.4 * v**-0.7 for v in values], limit)
    assert found == pytest.approx((0.4 / limit) ** (1 / 0.7), rel=5e-4)


def test_rounding_does_not_leave_the_interval():
    values = [1.00004, 1.00001]
    assert min(values) <= most_cautious(values, [0.4, 0.1], 0.2) <= max(values)
