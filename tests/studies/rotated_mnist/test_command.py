"""The study's command and presets, and one sentence for whatever is wrong."""

from __future__ import annotations

import pytest
from acnml.cli.rotated_mnist import run_study

from studies.rotated_mnist.study import PRESETS
from studies.settings import override


def test_the_command_reports_what_is_finished(tmp_path, capsys):
    run_study("quick", ["seeds=0,1"], tmp_path, report_only=True)
    said = capsys.readouterr().out
    assert "taking scikit-learn's 8x8 digits" in said
    assert "The study is not finished" in " ".join(said.split())
    assert "train network, seed 1" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("preset", "setting", "message"),
    [
        ("slow", [], "there is no preset 'slow', only quick, full"),
        ("quick", ["images.cheep=3"], "did you mean images.cheap?"),
        ("quick", ["angles=30"], "the angles must have 0 among them"),
        ("quick", ["frontier.shifts=60"], "there is no shift '60': write an angle such as 60°"),
        ("quick", ["naive_cnml.shift=60"], "there is no shift '60'"),
        ("quick", ["training.epochs=0"], "epochs must be a positive, finite number, got 0"),
        ("quick", ["hidden="], "hidden must"),
        ("quick", ["dropout=1"], "dropout must be at least 0 and below 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path, preset, setting, message):
    with pytest.raises(SystemExit) as error:
        run_study(preset, setting, tmp_path, report_only=True)
    assert message in str(error.value)


def test_presets():
    assert set(PRESETS) == {"quick", "full"}
    full = PRESETS["full"]
    assert full.seeds == (0, 1, 2)
    assert full.shifts == (*(f"{angle}°" for angle in range(0, 181, 15)), "random")
    assert full.images.cheap == 10_000
    with pytest.raises(ValueError, match="angles must have 0"):
        override(full, ["angles=30,60"])
