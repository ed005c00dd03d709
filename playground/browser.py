"""Look at a folder of pages with Chromium: a script of `playground/tests` says what it sees there.

The scripts write observations as JSON and judge nothing. Tests and `python -m benchmarks.sliders`
read them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playground import server

ROOT = Path(__file__).parent
SCRIPTS = ROOT / "tests"


def chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium")


def lacking() -> str | None:
    """Return what the scripts need and is not here, or None."""
    if shutil.which("node") is None or not (ROOT / "node_modules").exists():
        return "Node.js with the playground's packages is not installed, run `make page`"
    if chromium() is None:
        return "Chromium is not installed; install it, or set CHROMIUM to the path of Chrome"
    return None


def observe(script: str, folder: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Serve a folder to Chromium, run a script with these words, and return its observations."""
    with tempfile.TemporaryDirectory() as place, server.serve(0, folder) as pages:
        target = Path(place) / "seen.json"
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        command = ["node", str(SCRIPTS / script), server.address(pages), str(target), *words]
        environment = {**os.environ, "CHROMIUM": str(chromium())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        pages.shutdown()
        if done.returncode != 0:
            raise RuntimeError(f"{script} failed: {done.stderr}")
        found: dict[str, Any] = json.loads(target.read_text())
    return found
