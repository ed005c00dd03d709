"""Files that are complete or not there."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is complete or not there: beside its place first, and then moved."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
