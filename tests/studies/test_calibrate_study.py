"""The study of `calibrate`: features stand for images, and counts and pages follow the numbers."""

from __future__ import annotations

import csv
import io

import pytest
import torch
from rich.console import Console
from torch import nn

import acnml
from acnml import Classifier, Map, Tempered, metrics
from acnml.cli._shared.digits import Labelled
from studies import calibrate as study_module
from studies.calibrate import ACNML, EQUAL, CalibrateStudy, Scored, Subject, run, verdict, wins
from studies.store import Reporter, Store


def subject() -> Subject:
    """A small network on noisy clusters; the shift scales its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.arange(1200) % 3
        x = 1.5 * torch.randn(3, 4)[labels] + torch.randn(1200, 4)
        network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[:150]), labels[:150]).backward()
            optimizer.step()
    parts = [Labelled(x[s], labels[s]) for s in (slice(0, 150), slice(150, 750), slice(750, 1200))]
    train, held_out, test = (Labelled(p.inputs[:, :, None, None], p.labels) for p in parts)

    def load(shift: str) -> Labelled:
        return Labelled((1.0 if shift == "clean" else float(shift)) * test.inputs, test.labels)

    shifts = {"clean": "clean", "2": "scaled", "4": "scaled"}
    flat = nn.Sequential(nn.Flatten(), *network)
    return Subject("tiny", lambda: flat, lambda x: x, train, held_out, shifts, load)


STUDY = CalibrateStudy(networks=("mnist",), prices=(0.01, 0.02, 0.05))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "mnist_subject", lambda study, store: subject())
        patch.setattr(study_module, "figures", lambda study, rows: study_module.Panels({}, ""))
        for _ in range(2):  # the second run finds everything
            log = io.StringIO()
            store = Store(out, STUDY, Reporter(Console(file=log), out / "run.log"))
            run(STUDY, out, store)
    return out, log.getvalue()


def rows(out) -> list[Scored]:
    with (out / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    words = {"network", "shift", "group", "method"}
    return [Scored(**{k: v if k in words else float(v) for k, v in r.items()}) for r in lines]


def test_numbers_are_those_of_the_network_itself(finished):
    out, _ = finished
    own = subject()
    network = own.build()
    result = acnml.calibrate(network, [own.train], [own.held_out], price=0.02)
    equal = result.table[2].temperature
    for shift in own.shifts:
        data = own.load(shift)
        for method, predictor in (
            (ACNML, result),
            (EQUAL, Tempered(Map(Classifier(network)), equal)),
        ):
            expected = metrics.summary(predictor(data.inputs).double(), data.labels)
            (row,) = [r for r in rows(out) if (r.shift, r.price, r.method) == (shift, 0.02, method)]
            found = {name: getattr(row, name) for name in expected}
            assert found == pytest.approx(expected, abs=2e-4)


def test_a_second_run_computes_no_features(finished):
    _, log = finished
    assert "reused" in log
    assert "made" not in log


def test_pages_state_the_numbers(finished):
    out, _ = finished
    text = (out / "results.md").read_text()
    scaled = [r for r in rows(out) if (r.group, r.price, r.method) == ("scaled", 0.02, ACNML)]
    assert f"{sum(r.ece for r in scaled) / 2:.3f} /" in text
    assert "temperature, +0.02" in text  # the table that calibrate printed
    assert "Written by" in text
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")


def scored(method: str, shift: str, ece: float, nll: float) -> Scored:
    return Scored("n", shift, "g", 0.01, method, 10, 0.9, nll, 0.1, ece)


def test_wins_are_counted_by_shift():
    table = [
        *(scored(ACNML, "a", 0.1, 2.0), scored(EQUAL, "a", 0.2, 1.0)),
        *(scored(ACNML, "b", 0.3, 1.0), scored(EQUAL, "b", 0.2, 1.5)),
        *(scored(ACNML, "c", 0.1, 1.0), scored(EQUAL, "c", 0.3, 1.0)),
    ]
    assert wins(table, "ece") == (2, 3)
    assert wins(table, "nll") == (1, 3)
    study = CalibrateStudy(networks=("n",), prices=(0.01,))
    assert "n 2 of 3 by ECE and 1 by NLL" in verdict(study, table)
