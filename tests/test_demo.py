"""The demo, from its parts to the command, at a tiny size."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from acnml import cli
from acnml.cli._demo import figures
from acnml.cli._demo import study as demo
from acnml.cli._demo.report import conclusions, report
from acnml.cli._demo.study import (
    ACNML,
    BMA,
    LAST_LAYER,
    MAP,
    METHODS,
    DemoStudy,
    Trial,
    choose,
)
from acnml.cli._demo.summary import closing_sentence, table
from acnml.cli._demo.training import Training, small_network, train
from acnml.cli._shared import drawing
from acnml.cli._shared.digits import SIZE, load_digits, rotate
from acnml.cli._shared.files import write_file
from acnml.cli._shared.page import inline_svg, page
from silent import Silent

tiny_study = partial(
    DemoStudy,
    hidden=8,
    training=Training(epochs=4),
    validation_images=40,
    test_images=60,
    angles=(0, 60, 90),
    prior_precisions=(3.0, 30.0),
    samples=4,
)


@pytest.fixture(scope="module")
def findings():
    return demo.run(tiny_study(), Silent())


# Digits ----------------------------------------------------------------------------------------


def test_rotation():
    images = load_digits(validation=10, test=50, seed=0).test.inputs
    assert torch.equal(rotate(images, 0), images)
    assert torch.equal(rotate(images, 90), torch.rot90(images, 1, (-2, -1)))
    assert torch.equal(rotate(images, 180), torch.rot90(images, 2, (-2, -1)))
    turned = rotate(torch.ones(1, 1, 8, 8), 45)
    assert turned[0, 0, 0, 0] == 0  # background came into the corner
    assert turned.dtype == torch.float32
    assert turned.min() >= 0
    assert turned.max() <= 1


def test_digits_are_split_without_overlap_and_the_same_for_the_same_seed():
    digits, again = (load_digits(validation=100, test=200, seed=3) for _ in range(2))
    parts = [digits.train, digits.validation, digits.test]
    assert [len(part.labels) for part in parts] == [SIZE - 300, 100, 200]
    assert torch.equal(digits.test.inputs, again.test.inputs)
    everything = torch.cat([part.inputs for part in parts])
    whole = torch.cat([part.inputs for part in vars(load_digits(1, 1, seed=0)).values()])
    assert torch.equal(everything.flatten(1).sum(1).sort()[0], whole.flatten(1).sum(1).sort()[0])
    assert everything.shape == (SIZE, 1, 8, 8)
    assert everything.dtype == torch.float32
    assert (everything.min(), everything.max()) == (0, 1)


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="leave none for training"):
        load_digits(validation=1000, test=797, seed=0)


# Training --------------------------------------------------------------------------------------


def trained(seed: int) -> torch.Tensor:
    network = small_network(hidden=4, seed=seed)
    train(network, load_digits(100, 200, seed=0).validation, Training(epochs=1), seed)
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def test_training_depends_on_its_seed_and_on_nothing_else():
    state = torch.get_rng_state()
    first = trained(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(trained(seed=1), first)
    assert not torch.equal(trained(seed=2), first)


# Study -----------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers_and_leaves_no_trace(findings):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    progress = Silent()
    assert demo.run(tiny_study(), progress) == findings
    assert progress.done == findings.study.work
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_every_method_is_measured_at_every_angle(findings):
    assert list(findings.scores) == list(METHODS)
    assert all(list(by_angle) == [0, 60, 90] for by_angle in findings.scores.values())
    assert findings.scores[MAP][0].accuracy > 0.5 > findings.scores[MAP][90].accuracy
    assert len({example.label for example in findings.examples}) == len(findings.examples) == 3


def test_the_choice_spends_the_budget_and_no_more():
    trials = tuple(Trial(*numbers, 0.0) for numbers in [(1, 0.8), (10, 0.4), (100, 0.1)])
    assert choose(trials, budget=0.9) == 1
    assert choose(trials, budget=0.4) == pytest.approx(10)
    assert choose(trials, budget=0.2) == pytest.approx(10**1.5)  # halfway in log NLL and log τ
    assert choose(trials, budget=0.05) == 100


@pytest.mark.parametrize(
    "wrong", [{"angles": (60, 90)}, {"table_angles": (0, 45)}, {"prior_precisions": (2.0, 1.0)}]
)
def test_settings_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        tiny_study(**wrong)


# Words -----------------------------------------------------------------------------------------


def with_scores(findings, **by_method):
    """Findings with another ECE when turned and another NLL when upright, by method."""
    names = {"map": MAP, "bma": BMA, "acnml": ACNML, "last": LAST_LAYER}
    scores = {
        names[short]: {
            angle: before._replace(ece=ece, nll=nll)
            for angle, before in findings.scores[names[short]].items()
        }
        for short, (ece, nll) in by_method.items()
    }
    return replace(findings, scores=scores)


@pytest.mark.parametrize(
    ("acnml", "last", "expected"),
    [
        ((0.2, 0.5), (0.3, 0.6), "ACNML is better calibrated (ECE 0.20, last layer 0.30) than BMA"),
        ((0.5, 0.5), (0.6, 0.6), "(ECE 0.50, last layer 0.60) is not better calibrated than the"),
        ((0.399, 0.5), (0.5, 0.6), "is not better calibrated"),
        ((0.2, 0.5), (0.6, 0.6), "ACNML (ECE 0.20) is better calibrated than BMA (0.40) and MAP"),
        ((0.6, 0.5), (0.2, 0.6), "while ACNML (0.60) is not"),
        ((0.2, 0.5), (0.3, 0.6), "pays for its caution on upright digits with an NLL of 0.50"),
        ((0.2, 0.1), (0.3, 0.1), "at no price on upright digits"),
    ],
)
def test_the_closing_sentence_says_what_was_measured(findings, acnml, last, expected):
    changed = with_scores(findings, map=(0.7, 0.1), bma=(0.4, 0.3), acnml=acnml, last=last)
    sentence = closing_sentence(changed)
    assert expected in sentence
    assert sentence.endswith(".")
    assert ". " not in sentence
    assert conclusions(changed)  # the report's claims have all these cases as well


def test_the_best_of_a_column_is_marked_also_when_several_look_alike(findings):
    changed = with_scores(
        findings, map=(0.7, 0.1), bma=(0.4, 0.3), acnml=(0.2, 0.3), last=(0.2001, 0.3)
    )
    cells = table(changed, 60)
    assert [row[3].text for row in cells.values()] == ["0.700", "0.400", "0.200", "0.200"]
    assert [row[3].best for row in cells.values()] == [False, False, True, True]
    assert not any(row[1].best for row in cells.values())  # confidence is good or bad by itself


# Figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda f: figures.score_against_angle(f, "ece", "ECE"),
        lambda f: figures.confidence_against_angle(f, "Confidence"),
        lambda f: figures.reliability(ACNML, f.diagrams[ACNML], 60),
        lambda f: figures.trade_off(f, "Trade-off"),
        figures.overview,
    ],
)
def test_figures_are_functions_of_the_findings(findings, draw):
    figure = draw(findings)
    assert isinstance(figure, Figure)
    assert drawing.to_svg(figure) == drawing.to_svg(draw(findings))
    assert drawing.to_png(figure).startswith(b"\x89PNG")


def test_labels_are_moved_apart_and_only_where_needed():
    moved = drawing.spread({"a": 0.0, "b": 0.01, "c": 1.0}, gap=0.1)
    assert moved["b"] - moved["a"] == pytest.approx(0.1)
    assert moved["c"] == 1.0


# Page ------------------------------------------------------------------------------------------


class Balance(HTMLParser):
    """Opens and closes tags, and collects ids and what attributes refer to."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.references += [values[name] for name in ("href", "src") if name in values]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_well_formed_and_self_contained(findings):
    html = report(findings)
    parsed = Balance()
    parsed.feed(html)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(reference.startswith(("#", "data:")) for reference in parsed.references)
    targets = {reference[1:] for reference in parsed.references if reference[0] == "#"}
    targets |= set(re.findall(r"url\(#([^)]*)\)", html))
    assert targets <= set(parsed.ids)
    assert not re.search(r"https?:|file:|<script|@import|<link", html)


def test_figures_follow_the_colours_of_the_page(findings):
    html = report(findings)
    body = html[html.index("<body>") :]
    assert "var(--acnml)" in body
    assert set(re.findall(r"#[0-9a-f]{6}\b", body)) == set()


def test_text_is_escaped():
    assert "<title>acnml: a &lt;b&gt;</title>" in page("a <b>", "", [])
    svg = inline_svg('<?xml version="1.0"?><svg width="1"><g id="x"/></svg>', "n", 'say "<"', {})
    assert svg == '<svg role="img" aria-label="say &quot;&lt;&quot;"><g id="n-x"/></svg>'


def test_a_file_is_complete_or_not_there(tmp_path):
    write_file(tmp_path / "a", b"1")
    write_file(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_file(tmp_path / "folder", b"3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


# Command ---------------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_writes_the_report(monkeypatch, tmp_path, findings):
    monkeypatch.setattr(demo, "DemoStudy", tiny_study)
    out = tmp_path / "new" / "folder"
    result = CliRunner().invoke(cli.build_app(), ["demo", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for method in METHODS:
        assert len(re.findall(rf"^ +{method}  .*%", result.output, re.MULTILINE)) == 3
    assert f"Report: {out / 'report.html'}" in result.output
    words = " ".join(result.output.split())
    assert words.endswith(closing_sentence(findings))
    assert (out / "report.html").read_text(encoding="utf-8") == report(findings)
    assert sorted(path.name for path in out.iterdir()) == ["overview.png", "report.html"]
    assert "\x1b" not in result.output  # no terminal, no escape codes


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("it trained first"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        result = CliRunner().invoke(cli.build_app(), ["demo", "--out", str(out)])
        assert result.exit_code == 1
        assert f"Cannot write to {out}: " in result.output
        assert len(result.output.splitlines()) == 1


def test_missing_extras_are_one_line(monkeypatch):
    monkeypatch.setattr(cli, "EXTRAS", ("rich", "no_such_package"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    message = "The acnml command needs no_such_package: pip install 'acnml[demo]'"
    assert stop.value.code == message
