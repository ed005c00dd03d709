"""Parts of an unfinished artefact on disk, and the lock of the process that makes it.

Parts are checkpoints of training and blocks of predictions. A part that is torn, or was made from
other artefacts than those present now, counts as missing. When the artefact is complete, its parts
are removed.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from acnml._util.files import remove_drafts
from studies.files import write_file, writing
from studies.store.record import (
    Content,
    DamagedError,
    Header,
    Record,
    encode,
    read_record,
)


@final
@dataclass(frozen=True)
class Parts:
    """The parts of one artefact.

    Args:
        folder: where they are.
        origin: the stage's key, and the content hashes of the artefacts that it needs.
    """

    folder: Path
    origin: Header

    def load(self, name: str) -> Record | None:
        """Return a part, or None if it is missing, damaged or of another origin."""
        try:
            record = read_record(self._path(name))
        except (FileNotFoundError, DamagedError):
            return None
        return record if record.header.get("origin") == self.origin else None

    def save(self, name: str, content: Content, header: Header) -> None:
        """Write a part, replacing an older one of this name."""
        _, data = encode(content, {**header, "origin": self.origin})
        write_file(self._path(name), data)

    def names(self) -> list[str]:
        """Return the names of all parts, sorted."""
        return sorted(path.stem for path in self.folder.glob("[!.]*.safetensors"))

    def prepare(self) -> None:
        """Make the folder, and remove the drafts of a killed run in it and next to it."""
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        remove_drafts(self.folder.parent)
        remove_drafts(self.folder)

    def remove(self) -> None:
        """Remove all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


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

    The file is not removed: it has no content, and removing it would be a race.

    Args:
        path: an empty file, made if it is missing.
        on_wait: called when another process holds the lock, before waiting for it.
        on_missing: called where the system has no locks; two runs are then not safe.
    """
    with writing(path):
        file = path.open("ab")
    with file:
        if not _acquired(file, on_wait):
            on_missing()
        yield


def _acquired(file: BinaryIO, on_wait: Callable[[], None]) -> bool:
    """Wait for the lock; return False where the system has no locks."""
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
