"""Run the benchmarks, save the results, and update docs/performance.md.

python -m benchmarks              run all benchmarks
python -m benchmarks mlp head10   run only these and keep the saved results of the others
python -m benchmarks --page       only update the page from the saved results
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import acnml
from acnml.cli._shared.drawing import to_png
from acnml.cli._shared.files import write_file
from benchmarks import page
from benchmarks.head import head_rows
from benchmarks.measure import costs, gaps
from benchmarks.scaling import against_classes, against_training_images
from benchmarks.subjects import SUBJECTS

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results.json"
GAPS = ("diagonal", "Kronecker")


def main() -> None:
    """Run the benchmarks named on the command line, or all of them."""
    everything = ["last-layer", *SUBJECTS, "growth"]
    for name in everything if len(sys.argv) == 1 else sys.argv[1:]:
        if name in SUBJECTS:
            measure(name)
        elif name == "last-layer":
            save("last layer", head_rows())
        elif name == "growth":
            save("classes", against_classes())
            save("training images", against_training_images())
        elif name != "--page":
            sys.exit(f"there is no benchmark {name!r}; choose from {', '.join(everything)}")
    results = load()
    if {"costs", "gaps", "classes", "training images"} <= set(results):
        write_page(results)


def measure(name: str) -> None:
    """Measure one subject and save the results."""
    subject = SUBJECTS[name]()
    rows = costs(subject)
    for row in rows:
        print(f"{row['subject']:<22} {row['method']:<40} {row['forwards']:10.1f}", flush=True)
    save("costs", _without(load().get("costs", []), subject.name) + rows)
    if name in ("mlp", "resnet20"):
        found = [gaps(subject, posterior) for posterior in GAPS]
        save("gaps", _without(load().get("gaps", []), subject.name) + found)


def load() -> dict[str, Any]:
    """Return the saved results."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(key: str, value: object) -> None:
    """Save results under a key, with a description of the machine."""
    results = load() | {key: value, "environment": environment()}
    write_file(RESULTS, (json.dumps(results, indent=1) + "\n").encode())


def environment() -> dict[str, object]:
    """Return the software versions and the machine on which the results depend."""
    return {
        "acnml": acnml.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def write_page(results: dict[str, Any]) -> None:
    """Draw the figures of the page, and write its tables and numbers."""
    images = ROOT / "docs" / "images"
    write_file(images / "performance.png", to_png(page.overview(results)))
    write_file(images / "performance-classes.png", to_png(page.growth(results)))
    write_file(images / "performance-training.png", to_png(page.flatness(results)))
    subprocess.run([sys.executable, ROOT / "docs" / "_ext" / "results.py"], check=True)


def _without(rows: list[dict[str, Any]], subject: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["subject"] != subject]


if __name__ == "__main__":
    main()
