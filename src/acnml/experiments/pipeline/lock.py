"""A lock between processes, which the system releases when its holder dies, however it dies."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from acnml.experiments.files import writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # some network file systems


@contextmanager
def locked(
    path: Path, on_wait: Callable[[], None], on_missing: Callable[[], None]
) -> Iterator[None]:
    """Hold the lock of a path inside.

    The file stays behind: it means nothing by itself, and to remove it would be a race.

    Args:
        path: a file of no content, made where it is missing.
        on_wait: called when another process holds the lock, before waiting for it.
        on_missing: called where the system has no locks; then two runs are not kept apart.
    """
    with writing(path):
        file = path.open("ab")
    with file:
        if not _acquired(file, on_wait):
            on_missing()
        yield


def _acquired(file: BinaryIO, on_wait: Callable[[], None]) -> bool:
    """Take the lock, waiting for it; return whether there are locks at all."""
    if fcntl is None:
        return False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True
