"""What a browser sees is written down once, and all workers of pytest read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from filelock import FileLock


def once(
    name: str,
    factory: pytest.TempPathFactory,
    worker: str,
    observe: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return the observations of the first worker that comes here."""
    base = factory.getbasetemp()
    folder = base if worker == "master" else base.parent
    target = folder / f"{name}.json"
    with FileLock(folder / f"{name}.lock"):
        if not target.exists():
            target.write_text(json.dumps(observe()))
    found: dict[str, Any] = json.loads(target.read_text())
    return found
