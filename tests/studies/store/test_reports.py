"""What a run tells: the log, lines without a terminal, bars in one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from studies.store import Reporter, Stage, Store
from studies.store.store import versions

from .parts import Linear, numbers


def events(out: Path) -> list[str]:
    return [line.split()[3] for line in (out / "run.log").read_text().splitlines()]


def test_the_log_tells_what_happened(tmp_path, store):
    stage = Stage("train", seed=7)
    with pytest.raises(ZeroDivisionError):
        store.make(stage, lambda _: 1 / 0)
    store.make(stage, numbers)
    store.make(stage, numbers).path.write_bytes(b"")
    store.make(stage, numbers)
    expected = ["started", "begun", "stopped", "begun", "made", "reused", "again", "begun", "made"]
    assert events(tmp_path) == expected
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0].endswith(f"python {versions()['python']}")
    assert lines[2].endswith("ZeroDivisionError: division by zero")
    assert "is torn or not a safetensors file" in lines[6]
    assert all("train, seed 7" in line for line in lines[1:])


def test_without_a_terminal_every_stage_is_one_line(tmp_path):
    output = io.StringIO()
    store = Store(tmp_path, Linear(), Reporter(Console(file=output), tmp_path / "run.log"))
    store.make(Stage("train [bold]"), numbers)
    store.predict(Stage("predict"), 4, 1, lambda rows: {"p": torch.ones(1)})
    store.make(Stage("train [bold]"), numbers)
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["made", "made", "reused"]
    assert "train [bold], seed 0" in lines[0]
    assert lines[1].endswith("per input")
    assert "\x1b" not in output.getvalue()
