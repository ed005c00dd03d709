"""A run that is killed again and again writes the same bytes as one that is not."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra `predict`")

from acnml.scoring import Job, score
from scored import calibrated_files, contents, rows, write_parquet

KILLS = 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_six_kills(tmp_path):
    x = rows(160)
    x[np.random.default_rng(0).choice(160, 8, replace=False)] = np.nan
    write_parquet(tmp_path / "data.parquet", x, group=70)
    unbroken = Job(
        **calibrated_files(tmp_path),
        input=str(tmp_path / "data.parquet"),
        output=str(tmp_path / "unbroken"),
        part_rows=8,
        batch_rows=4,
    )
    score(unbroken)
    settings = {f.name: getattr(unbroken, f.name) for f in dataclasses.fields(unbroken)}
    plain = {k: v for k, v in settings.items() if k not in ("reading", "answers")}
    killed = json.dumps({**plain, "output": str(tmp_path / "killed")})
    script = Path(__file__).with_name("killing.py")
    run = subprocess.run(
        [sys.executable, script, killed, "0", str(KILLS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["kills"] == KILLS
    found, expected = contents(tmp_path / "killed"), contents(tmp_path / "unbroken")
    assert len(expected) > 20
    assert found == expected
