"""A study of tabular data, with a rule and a choice of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from acnml import metrics
from acnml.predictors import Predictor
from stores import store_in
from studies.data import Labelled
from studies.engine import method as m
from studies.engine.choose import ByLeastNll
from studies.engine.grounds import Networks, Pair
from studies.engine.method import Method, Share
from studies.engine.report import write_report
from studies.engine.results import collect
from studies.engine.run import plan, run
from studies.engine.study import Model, Network, Plan, Study, StudyData
from studies.engine.workshop import Finished, Making, Workshop
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
    settings = Rows()
    study = build(settings)
    data, store = study.load(tmp_path), store_in(tmp_path, settings)
    run(study, data, Making(store))
    results = collect(study, data, Finished(store))
    assert results.missing == ()
    assert len(results.rows) == 2 * 2 * 2  # methods, shifts, seeds
    workshop = Workshop(study, data, Finished(store), 1)
    classifier = workshop.classifier("network", workshop.weights("network"))
    held_out, (inputs, labels) = data.held_out, data.load("3", 50)
    nlls = {
        value: metrics.nll(DistanceAware(classifier, value)(held_out.inputs), held_out.labels)
        for value in (0.1, 1.0)
    }
    best = min(nlls, key=lambda value: nlls[value])
    expected = metrics.nll(DistanceAware(classifier, best)(inputs), labels)
    (found,) = [r for r in results.rows if (r.method.rule, r.seed, r.shift) == (*ROW, "3")]
    assert found.method.value == best
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert "distance-aware" in write_report(results, tmp_path).read_text()
    assert sum(line.stages for line in plan(study)) == 2 * (1 + 3 + 4)


ROW = ("distance-aware", 1)
