"""Measurements are written by the commands that measure, as files that the pages can read."""

from __future__ import annotations

import pytest

from benchmarks.recording import MEASUREMENTS, record, recorded
from pages import ROOT

FILES = sorted(MEASUREMENTS.glob("*.csv"))


def test_rows_are_read_as_they_were_recorded(tmp_path):
    rows = [{"name": "a, b", "ms": 1 / 3, "count": 10**9}, {"name": "c", "more": 2.0}]
    record(tmp_path / "new" / "file.csv", rows)
    first, second = recorded(tmp_path / "new" / "file.csv")
    assert first == {"name": "a, b", "ms": "0.333333", "count": "1000000000", "more": ""}
    assert second == {"name": "c", "ms": "", "count": "", "more": "2"}
    assert recorded(tmp_path / "none.csv") == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_command_writes_the_file(file):
    """A page that reads the file is no proof that a command writes it."""
    folders = ("benchmarks", "fuzz", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert any(file.name in path.read_text("utf-8") for path in sources)
