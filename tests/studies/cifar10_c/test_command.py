"""The study's command: its plan, its report, and one sentence for whatever is wrong."""

from __future__ import annotations

import pytest

from studies.cifar10_c import KIND
from studies.cifar10_c.settings import PRESETS
from studies.data import cifar10
from studies.engine.command import build, run_study, show_plan
from studies.engine.run import phases


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_needs_nothing(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(cifar10, "load", None)
    study = build(KIND, preset, [])
    show_plan(study)
    said = capsys.readouterr().out
    for phase in phases(study):
        assert phase.title in said
    assert "forward passes" in said
    assert list(tmp_path.iterdir()) == []


def test_the_command_runs_and_reports(tmp_path, capsys):
    settings = ["model=tiny", "choice.held_out=20", "corruptions=contrast", "severities=5,4"]
    run_study(
        build(KIND, "cpu", [*settings, "images.in_distribution=1000"]), tmp_path, report_only=True
    )
    assert "The study is not finished" in " ".join(capsys.readouterr().out.split())
    assert "train SWA, seed 0" in (tmp_path / "report.html").read_text()
    command = " --set ".join(["python -m studies cifar10-c --preset cpu", *settings])
    for page in ("report.html", "results.md"):
        assert f"{command} --set images.in_distribution=1000" in (tmp_path / page).read_text()


def test_missing_data_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "load", LOAD)
    with pytest.raises(SystemExit) as error:
        run_study(build(KIND, "cpu", []), tmp_path, report_only=True)
    assert "`python -m studies data download cifar10` gets it" in str(error.value)


LOAD = cifar10.load
