"""Measure the playground in Chromium: `python -m benchmarks.sliders`, after `make page`.

A slider's event changes the image; the time until all bars are updated is measured 400 times. The
time of the clock includes what other programs do on the machine, `computing` is the time that the
page's thread computes for a movement. The first load is what the browser receives until the page
answers. Results for the data that the page's network was trained on go to
docs/results/measurements/playground.csv.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from benchmarks.recording import MEASUREMENTS, record, recorded
from playground import browser, model

FILE = MEASUREMENTS / "playground.csv"
DIST = browser.ROOT / "dist"


def main() -> None:
    """Use the page once and keep what it took."""
    if reason := browser.lacking():
        sys.exit(f"The playground cannot be measured: {reason}.")
    data = json.loads((model.FOLDER / model.INFO).read_text())["data"]
    seen = browser.observe("browse.mjs", DIST)
    p50, p95 = np.percentile(seen["speed"]["times"], [50, 95])
    found: dict[str, object] = {
        "data": data,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "computing_ms": float(seen["speed"]["computing"]),
        "first_load_mb": sum(request["bytes"] for request in seen["requests"]) / 1e6,
        "model_mb": (model.FOLDER / model.ONNX).stat().st_size / 1e6,
    }
    print(found)
    others = [row for row in recorded(FILE) if row["data"] != data]
    record(FILE, sorted([*others, found], key=lambda row: str(row["data"])))


if __name__ == "__main__":
    main()
