"""The study's command and presets, and one sentence for whatever is wrong."""

from __future__ import annotations

from studies.engine.command import build, run_study
from studies.rotated_mnist import KIND


def test_the_command_reports_what_is_finished(tmp_path, capsys):
    run_study(build(KIND, "quick", ["seeds=0,1"]), tmp_path, report_only=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "using scikit-learn's 8x8 digits" in said
    assert "The study is not finished" in said
    assert "train network, seed 1" in (tmp_path / "report.html").read_text()
