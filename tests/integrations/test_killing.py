"""A run that is killed again and again writes the same bytes as one that is not."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra `predict`")

from acnml.scoring import score
from dying import start_and_kill
from scored import contents, rows, write_parquet


def test_killed_until_it_is_done(job, tmp_path):
    """Every process writes a little more than the one before."""
    x = rows(160)
    x[np.random.default_rng(0).choice(160, 8, replace=False)] = np.nan
    write_parquet(Path(job.input), x, group=70)
    unbroken = replace(job, part_rows=8, batch_rows=4)
    killed, step = replace(unbroken, output=str(tmp_path / "killed")), 12
    score(unbroken)
    while True:
        process = start_and_kill(step, killed.output, score, killed)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        step += 5  # each dies at another moment, and does more than it finds
    assert step > 12 + 5 * 5
    found, expected = contents(killed.output), contents(unbroken.output)
    assert len(expected) > 20
    assert found == expected
