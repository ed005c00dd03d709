"""What a run tells: the log, lines without a terminal, bars in one."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from studies.store import Reporter, Stage, Store, parts
from studies.store.store import versions
from tiny_study import TinyStudy

from .parts import ALL, Linear, made, numbers


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


def test_the_log_tells_where_a_run_goes_on(tmp_path, store):
    def compute(rows: slice) -> dict[str, torch.Tensor]:
        if rows.start == 2 and "stopped" not in events(tmp_path):
            raise KeyboardInterrupt
        return {"p": torch.ones(1)}

    with pytest.raises(KeyboardInterrupt):
        store.predict(Stage("predict"), 3, 1, compute)
    store.predict(Stage("predict"), 3, 1, compute)
    assert events(tmp_path) == ["started", "begun", "stopped", "resumed", "begun", "made"]
    assert "after rows-0000001-0000002" in (tmp_path / "run.log").read_text()


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


def test_in_a_terminal_a_stage_has_a_bar(tmp_path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    store = Store(tmp_path, Linear(), Reporter(console, tmp_path / "run.log"))
    store.predict(Stage("predict"), 4, 1, lambda rows: {"p": torch.ones(1)})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    assert re.search(r"predict, seed 0 ━+ 100% 0:00:0\d left 0:00:00", shown)
    assert shown.splitlines()[-1].startswith("made     predict, seed 0")


def test_without_locks_a_run_says_so_once(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "fcntl", None)
    assert made(tmp_path, TinyStudy()) == ALL
    assert events(tmp_path).count("careful") == 1
