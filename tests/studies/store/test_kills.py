"""Runs that are killed, race each other or find the disk full: nothing is lost, nothing differs.

Real processes are killed by SIGKILL. Whatever happens, the artefacts must equal, bit for bit, those
of a run that nothing happened to.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from studies.files import CannotWriteError
from studies.store.parts import locked
from tiny_study import (
    Run,
    TinyStudy,
    calls,
    contents,
    run_alone,
    run_and_die,
    stages,
    start,
)

WORK = [f"train {epoch}" for epoch in range(2)] + ["fit 0"]
WORK += [f"{method} {row}" for method in ("bma", "map") for row in (0, 2, 4)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The artefacts of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    Run(out)()
    assert calls(out) == WORK
    return contents(out)


def assert_complete(out: Path, undisturbed, lost: int) -> None:
    """The run's folder is as it should be, and at most `lost` pieces of work were done twice."""
    found = contents(out)
    assert found.keys() == undisturbed.keys()
    for label, tensors in undisturbed.items():
        assert found[label].keys() == tensors.keys()
        assert all(torch.equal(found[label][name], tensors[name]) for name in tensors)
    done = Counter(calls(out))
    assert set(done) == set(WORK)
    assert done.total() - len(WORK) <= lost
    files = {path.name for path in (out / "artefacts").glob("*/*")}
    assert files == {"artefact.safetensors", "header.json", "lock"}


def finished_stages(out: Path) -> set[str]:
    """The first words of the calls that belong to stages with an artefact."""
    folders = {path.parent.name for path in (out / "artefacts").glob("*/artefact.safetensors")}
    return {name for name, stage in stages(TinyStudy()).items() if stage.label in folders}


def test_killed_at_every_moment(tmp_path, undisturbed):
    """Every third moment, which is not the period of anything that a run does."""
    for step in range(1, 1000, 3):
        out = tmp_path / f"{step}"
        process = start(run_and_die, Run(out), step)
        process.join()
        finished, before = finished_stages(out), len(calls(out))
        Run(out)()
        assert not {call.split()[0] for call in calls(out)[before:]} & finished
        assert_complete(out, undisturbed, lost=1)
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert step > 40  # there were so many moments


def wait_for(out: Path, line: str, times: int) -> None:
    """Wait until the log has a word so many times."""
    log, deadline = out / "run.log", time.monotonic() + 600
    while not log.exists() or log.read_text().count(line) < times:
        assert time.monotonic() < deadline, f"{line!r} never came"
        time.sleep(0.01)


@pytest.mark.parametrize("step", [None, 30])
def test_runs_in_one_folder_wait_for_each_other(tmp_path, undisturbed, step):
    place = tmp_path / "artefacts" / stages(TinyStudy())["train"].label
    place.mkdir(parents=True)
    run = Run(tmp_path, pause=0.01)
    with locked(place / "lock", on_wait=pytest.fail, on_missing=pytest.fail):
        others = [start(run_alone, run), start(run_alone, run)]
        if step is not None:  # one of them dies on its way
            others.append(start(run_and_die, run, step))
        wait_for(tmp_path, "waiting", times=len(others))
        assert calls(tmp_path) == []
    for process in others:
        process.join()
    assert [process.exitcode for process in others[:2]] == [0, 0]
    # Without a death nothing is done twice: what one makes, the others use.
    assert_complete(tmp_path, undisturbed, lost=0 if step is None else 1)


# A full disk -----------------------------------------------------------------------------------


def test_a_full_disk_is_said_clearly_and_loses_nothing(tmp_path, undisturbed, monkeypatch):
    """Every file that is written is once the one that finds the disk full."""
    for step in range(1, 1000):
        out, writes = tmp_path / f"{step}", iter(range(1, 1000))

        def fail(file: int, step: int = step, writes=writes) -> None:
            if next(writes) >= step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fail)
        try:
            Run(out)()
            break
        except CannotWriteError as error:
            message = str(error)
        monkeypatch.undo()
        assert message.startswith("Cannot write /")
        assert "No space left on device. Nothing that was finished is lost: free some" in message
        assert "run the same command again" in message
        assert list(out.rglob("*.tmp")) == []
        Run(out)()
        assert_complete(out, undisturbed, lost=1)
    assert step > 15


@pytest.mark.parametrize("file", ["out", "out/artefacts", "out/run.log"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if file.endswith("log") else path.touch()
    with pytest.raises(CannotWriteError, match=f"Cannot write {path}.*run the same command again"):
        Run(tmp_path / "out")()
