"""The study that docs/howto/write-a-study.md shows is one file, and runs as it is printed there."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write-a-study.md"


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rotated_digits.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("rotated_digits.py", run_name="__main__")
    assert end.value.code in (0, None)


def test_the_study_in_the_documentation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    Path("rotated_digits.py").write_text(code)
    run(monkeypatch, "--dry-run")
    assert "training network" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["rotated_digits.py"]

    few = ["--set", "angles=0,60", "--set", "training.epochs=10"]
    run(monkeypatch, *few)
    first = capsys.readouterr().out
    made = re.findall(r"^made +(\S.*?), seed", first, re.MULTILINE)
    assert len(made) == len(set(made)) == 3 + 8 + 6  # networks, choices, predictions
    out = tmp_path / "rotated-digits"
    metrics = (out / "metrics.csv").read_bytes()
    assert b",ACNML,KFAC last layer,linearised" in metrics
    report = (out / "results.md").read_text()
    assert "| yes |" in report
    assert "Written by `python rotated_digits.py --preset " in report
    assert "<svg" in (out / "report.html").read_text()

    run(monkeypatch, *few)
    assert not re.findall(r"^made ", capsys.readouterr().out, re.MULTILINE)
    assert (out / "metrics.csv").read_bytes() == metrics

    run(monkeypatch, *few[2:], "--set", "angles=0,60,90")
    again = re.findall(r"^made +(\S.*?), seed", capsys.readouterr().out, re.MULTILINE)
    assert len(again) == 3
    assert all("90°" in name for name in again)
