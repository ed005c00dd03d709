"""Folders that commands write to."""

from __future__ import annotations

import sys
from pathlib import Path


def require_writable(folder: Path) -> None:
    """Make the folder, or end with one line that says why it cannot be written to."""
    probe = folder / ".acnml-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        sys.exit(f"Cannot write to {folder}: {error.strerror}. Choose another folder with --out.")
