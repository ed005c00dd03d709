"""The study of the evidence: recorded features stand for images, and pages follow the numbers."""

from __future__ import annotations

import csv
import io

import pytest
import torch
from rich.console import Console
from torch import nn

import acnml
from acnml import Classifier, Map, Tempered, metrics, tuning
from acnml.cli._shared.digits import Labelled
from acnml.predictors.pnml import genie_log_probs
from studies.evidence import report
from studies.evidence import study as study_module
from studies.evidence.measures import Interval, Scored, resampled, resamples
from studies.evidence.methods import (
    ACNML,
    DENSITY,
    EQUAL,
    METHODS,
    NEIGHBOURS,
    OWN_CHOICE,
    WEIGHED,
)
from studies.evidence.report import won_and_lost, write_pages
from studies.evidence.settings import EvidenceStudy
from studies.evidence.study import Evidence, collect
from studies.evidence.subjects import Subject
from studies.store import Reporter, Store

PRICE = 0.02
STUDY = EvidenceStudy(networks=("tiny",), test=200, prices=(PRICE,), resamples=50)


def subject() -> Subject:
    """A small network on noisy clusters; the shift scales its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.arange(650) % 3
        x = 1.5 * torch.randn(3, 4)[labels] + torch.randn(650, 4)
        network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[:150]), labels[:150]).backward()
            optimizer.step()
    parts = [Labelled(x[s], labels[s]) for s in (slice(0, 150), slice(150, 450), slice(450, 650))]
    train, held_out, test = parts

    def load(shift: str) -> Labelled:
        return Labelled((1.0 if shift == "clean" else float(shift)) * test.inputs, test.labels)

    shifts = {"clean": "clean", "2": "scaled", "4": "scaled"}
    return Subject("tiny", lambda: network, lambda x: x, train, held_out, shifts, load)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("evidence")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "subject", lambda name, study, cache, store: subject())
        patch.setattr(report, "figures", lambda study, rows: report.Panels({}, ""))
        for _ in range(2):  # the second run finds everything
            log = io.StringIO()
            store = Store(out, STUDY, Reporter(Console(file=log), out / "run.log"))
            evidence = collect(STUDY, out, store)
        write_pages(STUDY, evidence, out)
    return evidence, out, log.getvalue()


def test_numbers_are_those_of_the_library_on_the_network_itself(finished):
    evidence, _, _ = finished
    own = subject()
    network = own.build()
    classifier, train, held_out = Classifier(network), [own.train], [own.held_out]
    plain = acnml.calibrate(network, train, held_out, price=PRICE, typicality=False)
    typicality = acnml.fit_typicality(classifier, train, held_out)
    neighbours = acnml.fit_neighbours(classifier, train, held_out, k=STUDY.neighbours)
    predictors = {
        ACNML: plain,
        WEIGHED: acnml.calibrate(network, train, held_out, price=PRICE, typicality=True),
        EQUAL: Tempered(Map(classifier), plain.temperature_of_equal_price),
        DENSITY: tuning.density_temperature(classifier, typicality, held_out, PRICE),
        NEIGHBOURS: tuning.density_temperature(classifier, neighbours, held_out, PRICE),
    }
    for method, predictor in predictors.items():
        for shift in own.shifts:
            data = own.load(shift)
            expected = metrics.summary(predictor(data.inputs).double(), data.labels)
            (row,) = report.select(evidence.rows, shift=shift, price=PRICE, method=method)
            found = {name: getattr(row, name) for name in expected}
            assert found == pytest.approx(expected, abs=5e-4), method


def test_own_choices_are_not_worse_than_the_temperature_on_held_out_data(finished):
    evidence, _, _ = finished
    assert {row.method for row in evidence.rows} == set(METHODS)
    assert {row.price for row in evidence.rows} == {*STUDY.prices, OWN_CHOICE}
    own = subject()
    classifier = Classifier(own.build())
    typicality = acnml.fit_typicality(classifier, [own.train], [own.held_out])
    predictor = tuning.density_temperature(classifier, typicality, [own.held_out])
    (row,) = report.select(evidence.rows, shift="4", price=OWN_CHOICE, method=DENSITY)
    data = own.load("4")
    assert row.nll == pytest.approx(metrics.nll(predictor(data.inputs), data.labels), abs=1e-3)


def test_a_second_run_computes_nothing(finished):
    _, _, log = finished
    assert "reused" in log
    assert "made" not in log


def test_pages_state_the_numbers(finished):
    evidence, out, _ = finished
    text = (out / "results.md").read_text()
    scaled = report.select(evidence.rows, group="scaled", price=PRICE, method=WEIGHED)
    assert f"| +0.02 | {WEIGHED} | {report.mean(scaled, 'ece'):.3f} |" in text
    assert "density temperature" in report.verdict(STUDY, evidence)
    with (out / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(evidence.rows)
    assert {line["auroc_regret"] for line in lines if line["method"] == DENSITY} == {""}
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_resample_of_every_image_once_gives_the_metrics():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (400,), generator=generator)
    log_probs = torch.log_softmax(logits, -1)
    found = resampled(log_probs, labels, torch.ones(1, 400, dtype=torch.float64))
    summary = metrics.summary(log_probs, labels)
    for score, values in found.items():
        assert values.item() == pytest.approx(summary[score], abs=1e-9)
    weights = resamples(400, 300, seed=1)
    assert (weights.sum(1) == 400).all()
    by_repeating = log_probs.repeat_interleave(weights[0].long(), 0)
    repeated = labels.repeat_interleave(weights[0].long())
    again = resampled(log_probs, labels, weights)
    assert again["nll"][0].item() == pytest.approx(metrics.nll(by_repeating, repeated))
    assert again["brier"][0].item() == pytest.approx(metrics.brier(by_repeating, repeated))
    error = abs(again["ece"].mean().item() - summary["ece"])
    assert error < 3 * again["ece"].std().item()


def test_shifts_are_counted():
    """Shift a is won for certain, b lost for certain, c won by a difference within its interval."""
    rows, draws = [], {}
    for shift, own, rival, spread in (("a", 1.0, 2.0, 0.1), ("b", 2, 1, 0.1), ("c", 1, 1.1, 1.0)):
        for method, value in ((ACNML, own), (EQUAL, rival)):
            blank = dict.fromkeys(Scored._fields, 0.0)
            values = {"network": "n", "shift": shift, "group": "g", "price": 0.01, "nll": value}
            rows.append(Scored(**{**blank, **values, "method": method}))
            noise = spread * torch.linspace(-1, 1, 101) if method == ACNML else torch.zeros(101)
            draws["n", shift, 0.01, method, "nll"] = value + noise
    evidence = Evidence(rows, draws)
    own = report.select(rows, method=ACNML)
    assert won_and_lost(evidence, own, EQUAL, "nll") == "2 (1) : 1 (1)"
    assert report.difference(evidence, own, EQUAL, "nll").mean == pytest.approx(-0.1 / 3)
    assert str(Interval(-0.1, -0.2, 0.3)) == "-0.1000 [-0.2000, +0.3000]"


def test_leverage_nml_by_hand():
    """No leverage leaves the network as it is; an unlikely label has a temperature of 1 + l."""
    logits = torch.tensor([[0.0, -30.0, -40.0]], dtype=torch.float64)
    log_probs = torch.log_softmax(logits, -1)
    none = genie_log_probs(logits, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(none, log_probs)
    some = genie_log_probs(logits, torch.full((1,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(some[:, 1:], log_probs[:, 1:] / 1.5, rtol=1e-6, atol=0)
    p, h = log_probs.exp(), 0.5 / 1.5
    torch.testing.assert_close(some, (p / (p + p**h * (1 - p))).log(), rtol=1e-9, atol=1e-12)
