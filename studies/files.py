"""Files of the commands: errors while writing say what to do, drafts of killed runs are removed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from acnml._util import files
from acnml.storage import StorageError


@final
class CannotWriteError(OSError):
    """A file or folder cannot be written; the message says which, why, and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` while writing into a `CannotWriteError` that names the path.

    `acnml.save` raises a `StorageError` with the `OSError` as its cause.
    """
    try:
        yield
    except (OSError, StorageError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise CannotWriteError(
            f"Cannot write {path}: {cause.strerror or cause}. Nothing that was finished is lost: "
            f"{files.remedy_for(cause)}, and run the same command again."
        ) from error


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path."""
    with writing(path):
        return files.write_file(path, content)


def require_writable(folder: Path) -> None:
    """Make the folder, or exit with one line that says why it cannot be written to."""
    probe = folder / ".acnml-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        sys.exit(f"Cannot write to {folder}: {error.strerror}. Choose another folder with --out.")
