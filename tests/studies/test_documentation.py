"""The study that docs/pipeline.md shows runs as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path


def test_the_study_in_the_documentation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    Path("study.py").write_text(code)
    runpy.run_path("study.py")
    first = capsys.readouterr().out
    runpy.run_path("study.py")
    again = capsys.readouterr().out
    assert len(re.findall(r"^made ", first, re.MULTILINE)) == 5
    assert len(re.findall(r"^reused ", again, re.MULTILINE)) == 5
    scores = re.findall(r"^predict ACNML (\d+)°, seed 0 NLL ([\d.]+)", first, re.MULTILINE)
    assert scores == re.findall(r"^predict ACNML (\d+)°, seed 0 NLL ([\d.]+)", again, re.MULTILINE)
    assert [angle for angle, _ in scores] == ["0", "45", "90"]
    assert float(scores[0][1]) < float(scores[1][1]) < float(scores[2][1])
