"""Atomic writes: a file is complete or absent, and nothing but a regular file is ever replaced.

The content goes to a draft in the same folder, which then takes the place of the file. A writer
holds a lock on its draft, which the system releases when the process ends, however it ends. A draft
without a lock is therefore the remains of a killed writer, and the next write removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed: locks are not needed
    fcntl = None  # type: ignore[assignment]

ANOTHER_PLACE = "make it writable, or choose another folder"
REMEDIES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some space, your quota is used up",
    errno.EACCES: ANOTHER_PLACE,
    errno.EPERM: ANOTHER_PLACE,
    errno.EROFS: ANOTHER_PLACE,
    errno.EISDIR: "choose the name of a file",
    errno.EINVAL: "choose the name of a regular file, or a new one",
}

LONGEST_NAME = 200  # bytes of a file's name that are part of its drafts' names


def remedy_for(error: OSError) -> str:
    """Say what to do about an error while writing."""
    return REMEDIES.get(error.errno or 0, "check the path and the disk")


def require_target(path: Path) -> int | None:
    """Raise an error if a path cannot be written to; return the mode of the file there, if any."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not Path(os.path.realpath(path)).parent.is_dir():
            raise
        return None
    require_regular(path, mode)
    return mode


def require_regular(path: Path, mode: int) -> None:
    """Raise an error unless the mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        is_folder = stat.S_ISDIR(mode)
        what = "it is a folder" if is_folder else "it is a device, a pipe or a socket"
        code = errno.EISDIR if is_folder else errno.EINVAL
        raise OSError(code, f"{what}, not a file", str(path))


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path.

    A symbolic link is followed: the file that it leads to is replaced, or made. The mode follows
    the umask, but never permits more than that of the file that is replaced. Every failure is an
    `OSError`, and leaves an existing file unchanged.
    """
    with drafted(path) as file:
        file.write(content)
    return path


@contextmanager
def drafted(path: Path) -> Iterator[BinaryIO]:
    """Open a file to be written piece by piece; it is at its path once the block has ended.

    If the block ends with an error, nothing is at the path that was not there before. Otherwise
    this is like `write_file`.
    """
    target = Path(os.path.realpath(path))
    old = require_target(path)
    remove_abandoned(target.parent, _draft_prefix(target))
    with _draft_of(target) as (draft, file):
        if old is not None:
            own = os.fstat(file.fileno()).st_mode
            draft.chmod(stat.S_IMODE(own & old))
        yield file
        file.flush()
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # Windows renames no open files
        draft.replace(target)


def remove_abandoned(folder: Path, prefix: str | None = None) -> None:
    """Remove the drafts of killed writers in a folder: of one file, see `_draft_prefix`, or all."""
    with suppress(OSError):  # a folder that cannot be listed
        for draft in list(folder.glob(".*.tmp")):
            head, _, unique = draft.name.removesuffix(".tmp").rpartition(".")
            if len(unique) == 32 and prefix in (None, f"{head}.") and draft.is_file():
                _remove_if_abandoned(draft)


@contextmanager
def _draft_of(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Make a locked draft; remove it at the end if it has not become the target."""
    while True:
        draft = target.with_name(f"{_draft_prefix(target)}{uuid.uuid4().hex}.tmp")
        file = draft.open("xb")
        try:
            _lock(file, wait=True)
            # Another writer may have taken it for abandoned before it was locked.
            if draft.exists():
                yield draft, file
                return
        finally:
            with suppress(OSError):  # the first error is the one to report
                draft.unlink(missing_ok=True)
            with suppress(OSError):
                file.close()


def _draft_prefix(target: Path) -> str:
    """Return how the names of all drafts of a file begin; short enough for every file system."""
    name = target.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}."


def _remove_if_abandoned(draft: Path) -> None:
    with suppress(OSError):
        if fcntl is None:
            draft.unlink()  # the system refuses while it is open
            return
        with draft.open("rb") as file:
            if _lock(file, wait=False):
                draft.unlink(missing_ok=True)


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    """Lock a file; return False if it is locked already, or if there are no locks here."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # some network disks have no locks
        return False
    return True
