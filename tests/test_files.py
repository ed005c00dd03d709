"""Writing files: complete or absent, only regular files, and one clear error each."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import acnml
from acnml import Diagonal
from acnml._util import files
from acnml.storage import StorageError


def posterior(size: int = 3, value: float = 1.0) -> Diagonal:
    return Diagonal({"w": torch.full((size,), value)}, {"w": torch.ones(size)})


def mean(path: Path) -> float:
    return float(acnml.load(path).mean["w"][0])


@pytest.fixture
def umask():
    """Set the umask, and restore it."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_follows_the_umask(tmp_path, umask, mask, expected):
    umask(mask)
    acnml.save(posterior(), tmp_path / "new")
    assert mode(tmp_path / "new") == expected


def test_a_private_file_stays_private(tmp_path, umask):
    acnml.save(posterior(), tmp_path / "file")
    (tmp_path / "file").chmod(0o600)
    acnml.save(posterior(value=2.0), tmp_path / "file")
    assert mode(tmp_path / "file") == 0o600
    umask(0o077)
    (tmp_path / "file").chmod(0o644)
    acnml.save(posterior(value=2.0), tmp_path / "file")
    assert mode(tmp_path / "file") == 0o600


# Places that are not files ---------------------------------------------------------------------


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def make_link_to_pipe(path: Path) -> Path:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")
    return path


def inside_a_file(path: Path) -> Path:
    path.write_text("text")
    return path / "file"


PLACES = {
    "folder": (make_folder, "it is a folder, not a file; choose the name of a"),
    "link to a pipe": (make_link_to_pipe, "it is a device, a pipe or a socket, not a file"),
    "device": (lambda _: Path("/dev/null"), "it is a device, .* choose the name of a regular file"),
    "inside a file": (inside_a_file, "[Nn]ot a directory"),
}


@pytest.mark.parametrize(("make", "message"), PLACES.values(), ids=PLACES)
def test_places_that_are_not_files_are_refused(make, message, tmp_path):
    """None of them waits, and none of them is replaced."""
    path = make(tmp_path / "place")
    before = sorted(tmp_path.rglob("*"))
    for use in (acnml.load, lambda path: acnml.save(posterior(), path)):
        with pytest.raises(StorageError, match=f"(?i){message}"):
            use(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist: create it"):
        acnml.save(posterior(), tmp_path / "nowhere" / "file")
    with pytest.raises(FileNotFoundError):
        acnml.load(tmp_path / "nothing")


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_and_stays_a_link(tmp_path, exists):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if exists:
        acnml.save(posterior(), target)
    link.symlink_to("folder/target")
    acnml.save(posterior(value=5.0), link)
    assert link.is_symlink()
    assert not target.is_symlink()
    assert mean(target) == mean(link) == 5


# Disks that do not take the file ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "No space left on device; free some space"),
        (errno.EIO, "Input/output error; check the path and the disk"),
    ],
)
def test_errors_of_the_disk_leave_the_old_file_and_no_drafts(tmp_path, monkeypatch, code, message):
    path = tmp_path / "file"
    acnml.save(posterior(), path)

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=f"{path} cannot be written: .*{message}"):
        acnml.save(posterior(value=2.0), path)
    assert mean(path) == 1
    assert list(tmp_path.iterdir()) == [path]


# Drafts ------------------------------------------------------------------------------------------


def test_two_writers_at_once_both_finish(tmp_path):
    """The file is one of theirs, complete."""
    path = tmp_path / "file"
    code = "\n".join(
        [
            "import sys; from pathlib import Path; from acnml._util import files",
            "for _ in range(200): files.write_file(Path(sys.argv[1]), sys.argv[1].encode() * 100)",
        ]
    )
    command = [sys.executable, "-c", code, str(path)]
    writers = [subprocess.Popen(command) for _ in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert path.read_bytes() == str(path).encode() * 100
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_file_and_a_draft(tmp_path):
    path = tmp_path / "file"
    acnml.save(posterior(), path)
    code = """
import os, signal, sys
from pathlib import Path
from acnml._util import files
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
files.write_file(Path(sys.argv[1]), b"half")
"""
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert mean(path) == 1
    assert len(list(tmp_path.iterdir())) == 2
    files.remove_drafts(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
