"""Locks on folders, which the system releases when a process ends, however it ends.

A lock leaves no file behind. Windows and some network disks have no such locks. Then nothing is
held, and `is_unused` answers no.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for this folder."""
    with _opened(folder) as file:
        if fcntl is not None:
            _locked(file, fcntl.LOCK_EX)
        yield


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold a folder, as any number of processes may do at once."""
    with _opened(folder) as file:
        if fcntl is not None:
            _locked(file, fcntl.LOCK_SH)
        yield


def is_unused(folder: Path) -> bool:
    """Whether no process holds a folder; False if nobody can know."""
    with _opened(folder) as file:
        return fcntl is not None and _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    if fcntl is None:  # where folders cannot be opened either
        yield -1
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def _locked(file: int, how: int) -> bool:
    """Lock a file; return False if that is not possible."""
    assert fcntl is not None
    try:
        fcntl.flock(file, how)
    except OSError:  # held by another process, or a disk without locks
        return False
    return True
