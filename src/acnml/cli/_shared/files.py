"""Atomic writes: a file is complete or absent. Errors say what to do."""

from __future__ import annotations

import errno
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

REMEDIES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some space, your quota is used up",
    errno.EFBIG: "allow larger files (`ulimit -f`)",
    errno.EACCES: "make it writable, or choose another folder",
    errno.EPERM: "make it writable, or choose another folder",
    errno.EROFS: "make the disk writable, or choose another folder",
}


@final
class CannotWriteError(OSError):
    """A file or folder cannot be written; the message says which, why, and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` while writing into a `CannotWriteError` that names the path."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "remove the cause")
        raise CannotWriteError(
            f"Cannot write {path}: {error.strerror or error}. Nothing that was finished is lost: "
            f"{remedy}, and run the same command again."
        ) from error


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically, through a draft in the same folder, and return its path."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with writing(path):
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                draft.unlink(missing_ok=True)
            raise
    return path


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of killed writers; no process may be writing in the folder."""
    for draft in folder.glob(".*.tmp"):
        draft.unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Make the folder, or exit with one line that says why it cannot be written to."""
    probe = folder / ".acnml-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        sys.exit(f"Cannot write to {folder}: {error.strerror}. Choose another folder with --out.")
