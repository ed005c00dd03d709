"""The study's command: its plan, its report, and one sentence for whatever is wrong."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from studies.cifar10_c import KIND
from studies.cifar10_c.settings import PRESETS
from studies.data import cifar10
from studies.data.commands import draw_sheet
from studies.engine.command import build, run_study, show_plan
from studies.engine.run import phases
from studies.models.resnet import ResNet, SubsampleAndPad


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


@pytest.mark.parametrize(
    ("preset", "setting", "message"),
    [
        ("gpu", [], "there is no preset 'gpu', only cpu, scratch, vgg16-short, paper"),
        ("cpu", ["images.cheep=3"], "did you mean images.cheap?"),
        ("cpu", ["model=resnet21"], "there is no network 'resnet21'"),
        ("cpu", ["corruptions=fogg"], "there is no corruption 'fogg', only"),
        ("cpu", ["severities=6"], "severities must be some of 1, 2, 3, 4, 5"),
        ("cpu", ["images.cheap=1"], "the numbers of images must not grow"),
        ("cpu", ["schedule.epochs=2"], "one collected epoch has no variance"),
        ("cpu", ["curvature.images=0"], "images must be a positive, finite number, got 0"),
        ("cpu", ["frontier.alphas=1,-1"], "alphas must be a positive, finite number, got -1"),
        ("cpu", ["samples=0"], "samples must be a positive, finite number, got 0"),
        ("cpu", ["schedule.swa_start=9"], "resnet20 must collect at least two epochs"),
        ("cpu", ["choice.source=train"], "were trained on all training images"),
        ("cpu", ["seeds=1,0,1"], "seeds must differ, got 1, 0, 1"),
        ("cpu", ["choice.held_out=60"], "60 images of the test set cannot spare 60"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path, preset, setting, message):
    with pytest.raises(SystemExit) as error:
        run_study(build(KIND, preset, setting), tmp_path, report_only=True)
    assert message in str(error.value)


def test_missing_data_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "load", LOAD)
    with pytest.raises(SystemExit) as error:
        run_study(build(KIND, "cpu", []), tmp_path, report_only=True)
    assert "`python -m studies data download cifar10` gets it" in str(error.value)


def test_the_sheet_of_corruptions_needs_the_images(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "load", LOAD)
    with pytest.raises(SystemExit, match="python -m studies data download cifar10"):
        draw_sheet(tmp_path / "sheet.png")
    assert list(tmp_path.iterdir()) == []


LOAD = cifar10.load


def weights_for(widths, classes):
    return ResNet(classes, widths, 1, SubsampleAndPad).state_dict()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda: weights_for((2, 4, 8), 10), "is a weight file for another architecture"),
        (lambda: weights_for((2, 4), 7), "is for 7 classes, the model has 10"),
        (lambda: None, "there is no weight file"),
    ],
)
def test_wrong_weights_are_one_sentence(tmp_path, monkeypatch, weights, message):
    (tmp_path / "weights").mkdir()
    if (tensors := weights()) is not None:
        save_file(tensors, tmp_path / "weights" / "tiny.safetensors")
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    settings = ["model=tiny", "choice.held_out=20", "corruptions=contrast"]
    with pytest.raises(SystemExit) as error:
        run_study(build(KIND, "cpu", settings), tmp_path / "out", report_only=False)
    assert message in str(error.value)


def test_missing_pictures_of_frost_are_noticed_before_any_work(tmp_path):
    with pytest.raises(SystemExit, match="or leave the corruption 'frost' out"):
        run_study(
            build(KIND, "cpu", ["model=tiny", "choice.held_out=20"]), tmp_path, report_only=False
        )
    assert not (tmp_path / "artefacts").exists()
