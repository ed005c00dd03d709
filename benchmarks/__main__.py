"""Measure, save the numbers, and renew docs/performance.md from them.

python -m benchmarks              everything
python -m benchmarks mlp head10   only these; the other numbers stay as they are
python -m benchmarks --page       only the page, from the saved numbers
"""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

import acnml
from acnml.cli._shared.drawing import to_png
from acnml.cli._shared.files import write_file
from benchmarks import page
from benchmarks.measure import costs, gaps
from benchmarks.scaling import against_classes, against_training_images
from benchmarks.subjects import SUBJECTS

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results.json"
GAPS = ("diagonal", "Kronecker")


def main() -> None:
    """Run what the arguments name."""
    everything = [*SUBJECTS, "growth"]
    for name in everything if len(sys.argv) == 1 else sys.argv[1:]:
        if name in SUBJECTS:
            measure(name)
        elif name == "growth":
            save("classes", against_classes())
            save("training images", against_training_images())
        elif name != "--page":
            sys.exit(f"nothing is called {name!r} here; there are {', '.join(everything)}")
    results = load()
    if {"costs", "gaps", "classes", "training images"} <= set(results):
        write_page(results)


def measure(name: str) -> None:
    """Measure one subject and save what was found."""
    subject = SUBJECTS[name]()
    rows = costs(subject)
    for row in rows:
        print(f"{row['subject']:<22} {row['method']:<40} {row['forwards']:10.1f}", flush=True)
    save("costs", _without(load().get("costs", []), subject.name) + rows)
    if name in ("mlp", "resnet20"):
        found = [gaps(subject, posterior) for posterior in GAPS]
        save("gaps", _without(load().get("gaps", []), subject.name) + found)


def load() -> dict[str, Any]:
    """Return the saved numbers."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(key: str, value: object) -> None:
    """Save some numbers, with the machine that they come from."""
    results = load() | {key: value, "environment": environment()}
    write_file(RESULTS, (json.dumps(results, indent=1) + "\n").encode())


def environment() -> dict[str, object]:
    """Return what the numbers depend on."""
    return {
        "acnml": acnml.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def write_page(results: dict[str, Any]) -> None:
    """Put tables into the marked places of the page, and draw the figures beside it."""
    path, images = ROOT / "docs" / "performance.md", ROOT / "docs" / "images"
    tables = {"costs": page.cost_table(results), "gaps": page.gap_table(results)}
    text = path.read_text()
    for name, table in tables.items():
        marked = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(marked, rf"\g<1>\n{table}\n\n\g<2>", text, flags=re.DOTALL)
    write_file(path, text.encode())
    write_file(images / "performance.png", to_png(page.overview(results)))
    write_file(images / "performance-classes.png", to_png(page.growth(results)))
    write_file(images / "performance-training.png", to_png(page.flatness(results)))


def _without(rows: list[dict[str, Any]], subject: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["subject"] != subject]


if __name__ == "__main__":
    main()
