"""Atomic writes: a file is complete or absent, and nothing but a regular file is ever replaced.

The content goes to a draft in the same folder, which then takes the place of the file.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

ANOTHER_PLACE = "make it writable, or choose another folder"
REMEDIES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some space, your quota is used up",
    errno.EACCES: ANOTHER_PLACE,
    errno.EPERM: ANOTHER_PLACE,
    errno.EROFS: ANOTHER_PLACE,
    errno.EINVAL: "choose the name of a regular file, or a new one",
}


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
        what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise OSError(errno.EINVAL, f"it is {what}, not a file", str(path))


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path.

    A symbolic link is followed: the file that it leads to is replaced, or made. The mode follows
    the umask, but never permits more than that of the file that is replaced. Every failure is an
    `OSError`, and leaves an existing file unchanged.
    """
    old = require_target(path)
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("xb") as file:
            if old is not None:
                own = os.fstat(file.fileno()).st_mode
                draft.chmod(stat.S_IMODE(own & old))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            draft.unlink(missing_ok=True)
        raise
    return path


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of killed writers; no process may be writing in the folder."""
    for draft in folder.glob("." + 32 * "[0-9a-f]" + ".tmp"):
        draft.unlink(missing_ok=True)
