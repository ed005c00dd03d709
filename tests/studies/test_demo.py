"""The demo, from its parts to the command, at a tiny size."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

import acnml
from acnml import metrics
from short import Silent, command, no_trace
from studies.data.digits import rotate
from studies.demo import study as demo
from studies.demo.report import report
from studies.demo.study import ACNML, BEST, BMA, EQUAL, METHODS, NETWORK, PRICE, DemoStudy
from studies.demo.summary import closing_text, verdict
from studies.demo.training import Training, small_network, train

tiny_study = partial(
    DemoStudy,
    networks=2,
    hidden=8,
    training=Training(epochs=4),
    validation_images=200,
    test_images=60,
    angles=(0, 60, 90),
    samples=4,
)


@pytest.fixture(scope="module")
def findings():
    return demo.run(tiny_study(), Silent())


def test_the_same_seed_gives_the_same_numbers_and_leaves_no_trace(findings):
    progress = Silent()
    with no_trace():
        assert demo.run(tiny_study(), progress) == findings
    assert progress.done == findings.study.work


def test_every_method_is_measured_at_every_angle(findings):
    assert [run.seed for run in findings.runs] == [0, 1]
    for run in findings.runs:
        assert tuple(run.scores) == METHODS
        assert all(list(by_angle) == [0, 60, 90] for by_angle in run.scores.values())
        upright, turned = (run.scores[NETWORK][angle]["accuracy"] for angle in (0, 90))
        assert upright > 0.5 > turned
    assert len({example.label for example in findings.examples}) == len(findings.examples) == 3


@pytest.mark.filterwarnings("ignore:The price of")  # few digits say little about it
def test_scores_are_those_of_the_predictors_that_calibrate_makes(findings):
    """The study of the second network, written out."""
    study, run = findings.study, findings.runs[1]
    digits = demo.digits_of(study, seed=1)
    network = small_network(study.hidden, seed=1)
    train(network, digits.train, study.training, seed=1)
    calibrated = acnml.calibrate(network, digits.train, digits.validation, rule="acnml")
    assert run.chosen.table == str(calibrated)
    assert run.chosen.alpha == calibrated.alpha
    assert calibrated.calibrator.price == PRICE  # which is in the names of the methods

    def tempered(temperature):
        return acnml.Map(acnml.Classifier(network).tempered(temperature))

    expected = {
        NETWORK: acnml.Map(acnml.Classifier(network)),
        BEST: tempered(calibrated.temperature),
        EQUAL: tempered(calibrated.calibrator.temperature_of_equal_price),
        ACNML: calibrated.log_probs,
    }
    x, labels = rotate(digits.test.inputs, 60), digits.test.labels
    for method, predictor in expected.items():
        log_probs, scores = predictor(x), run.scores[method][60]
        for name, value in metrics.summary(log_probs, labels, study.bins).items():
            assert scores[name] == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_three_methods_pay_the_price_and_no_more(findings):
    for run in findings.runs:
        assert run.prices[BEST] == 0
        assert run.prices[NETWORK] >= 0
        for method in (EQUAL, BMA, ACNML):
            assert run.prices[method] == pytest.approx(PRICE, rel=1e-2)


def test_means_are_over_networks_and_shifted_angles(findings):
    first, second = (run.scores[ACNML] for run in findings.runs)
    means = [(by[60]["ece"] + by[90]["ece"]) / 2 for by in (first, second)]
    shifted = findings.shifted(ACNML, "ece")
    assert shifted.mean == pytest.approx(sum(means) / 2)
    assert shifted.spread == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    upright = (first[0]["nll"] + second[0]["nll"]) / 2
    assert findings.upright(ACNML, "nll").mean == pytest.approx(upright)
    turned = (first[60]["ece"] + second[60]["ece"]) / 2
    assert findings.curve(ACNML, "ece")[1] == pytest.approx(turned)


def with_eces(findings, **by_method):
    """Findings with another ECE at all angles: a number per network, by method."""
    names = {"network": NETWORK, "equal": EQUAL, "bma": BMA, "acnml": ACNML}
    runs = []
    for i, run in enumerate(findings.runs):
        eces = {names[short]: values[i] for short, values in by_method.items()}
        changed = {
            method: {angle: {**scores, "ece": eces[method]} for angle, scores in by_angle.items()}
            for method, by_angle in run.scores.items()
            if method in eces
        }
        runs.append(run._replace(scores={**run.scores, **changed}))
    return replace(findings, runs=tuple(runs))


@pytest.mark.parametrize(
    ("equal", "bma", "acnml", "expected"),
    [
        (0.6, 0.5, 0.3, "ACNML wins here: for 0.01 nats of NLL"),
        (0.6, 0.5, 0.3, "0.70 to 0.30, against 0.60 for a plain temperature"),
        (0.6, 0.2, 0.3, "ACNML beats a plain temperature but not BMA here"),
        (0.2, 0.5, 0.3, "ACNML beats BMA but not a plain temperature here"),
        (0.305, 0.305, 0.3, "ACNML does not win here"),  # hardly lower
        (0.6, 0.6, (0.1, 0.61), "ACNML does not win here"),  # networks disagree
    ],
)
def test_the_verdict_follows_from_the_numbers(findings, equal, bma, acnml, expected):
    own = acnml if isinstance(acnml, tuple) else (acnml, acnml)
    others = {"network": (0.7, 0.7), "equal": (equal, equal), "bma": (bma, bma)}
    sentence = verdict(with_eces(findings, **others, acnml=own))
    assert expected in sentence
    assert sentence.endswith(".")
    assert ". " not in sentence


@pytest.fixture(scope="module")
def page(findings):
    return report(findings).html()


def test_the_report_is_complete_in_itself_and_follows_the_scheme_of_the_page(findings, page):
    assert verdict(findings) in page
    assert not re.search(r"https?:|file:|<script|@import|<link", page)
    references = re.findall(r"""(?:href|src)="([^"]*)"|url\(([^)]*)\)""", page)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    targets = {one or other for one, other in references}
    assert {each for each in targets if not each.startswith("data:")} <= {
        f"#{each}" for each in ids
    }
    assert not re.search(r"#[0-9a-f]{6}\b", page[page.index("<body>") :])  # a fixed colour


def test_the_command_shows_a_table_and_writes_the_report(monkeypatch, tmp_path, findings, page):
    monkeypatch.setattr(demo, "DemoStudy", tiny_study)
    out = tmp_path / "new" / "folder"
    output = command("demo", "--out", out)
    lines = output.splitlines()
    for method in METHODS:
        rows = [line for line in lines if re.match(rf"^ +{re.escape(method)} +[+\d.]+.* ± ", line)]
        assert len(rows) == 2, method
    assert f"Report: {out / 'report.html'}" in output
    assert " ".join(closing_text(findings).split()) in " ".join(output.split())
    assert findings.runs[0].chosen.table in output
    assert (out / "report.html").read_text(encoding="utf-8") == page
    files = {path.name for path in out.iterdir()}
    assert files == {"overview-narrow.png", "overview.png", "report.html"}
    assert "\x1b" not in output  # no terminal, no escape codes
