"""Run the benchmarks, save the results, and update docs/performance.md.

python -m benchmarks              run all benchmarks
python -m benchmarks mlp growth   run only these and keep the saved results of the others
python -m benchmarks --device cuda mlp
                                  measure on a device; prints, and leaves the page alone
python -m benchmarks --page       only update the page from the saved results
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import acnml
from benchmarks import page
from benchmarks.head import head_rows
from benchmarks.measure import costs, gaps
from benchmarks.product import product_rows
from benchmarks.scaling import growths
from benchmarks.subjects import SUBJECTS
from studies.drawing import to_png
from studies.files import write_file

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results.json"
GAPS = ("diagonal", "Kronecker")


def main() -> None:
    """Run the benchmarks named on the command line, or all of them."""
    everything = ["product", "last-layer", *SUBJECTS, "gaps", "growth"]
    parser = argparse.ArgumentParser("python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(everything)}")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--page", action="store_true", help="only update the page")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(everything):
        parser.error(f"there is no benchmark {min(unknown)!r}; choose from {', '.join(everything)}")
    torch.set_num_threads(1)  # the CPU time of one thread is measured
    names = [] if chosen.page else chosen.names or everything
    for name in names:
        run(name, chosen.device)
    results = load()
    if chosen.device.type == "cpu" and {"costs", "gaps", "growth"} <= set(results):
        write_page(results)


def run(name: str, device: torch.device) -> None:
    """Run one benchmark. Results of a CPU are saved, those of other devices only printed."""
    if name in SUBJECTS:
        measure(name, device)
    elif device.type != "cpu":
        print(f"{name} is measured on a CPU alone", flush=True)
    elif name == "product":
        save("product", product_rows())
    elif name == "last-layer":
        save("last layer", head_rows())
    elif name == "gaps":
        measure_gaps()
    else:
        save("growth", growths())


def measure(name: str, device: torch.device) -> None:
    """Measure one subject."""
    subject = SUBJECTS[name]().to(device)
    rows = costs(subject)
    for row in rows:
        megabytes = "" if row["megabytes"] is None else f"{row['megabytes']:8.0f} MB"
        names = f"{row['subject']:<22} {row['method']:<40}"
        print(f"{names} {row['forwards']:10.1f} {megabytes}", flush=True)
    if device.type != "cpu":
        return
    save("costs", _without(load().get("costs", []), subject.name) + rows)
    save("earlier costs", _without(load().get("earlier costs", []), subject.name))


def measure_gaps() -> None:
    """Measure how far solutions are from the best one."""
    subjects = (SUBJECTS[name]() for name in ("mlp", "resnet20"))
    save("gaps", [gaps(subject, posterior) for subject in subjects for posterior in GAPS])


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
    write_file(images / "performance-growth.png", to_png(page.growth(results)))
    subprocess.run([sys.executable, ROOT / "docs" / "_ext" / "results.py"], check=True)


def _without(rows: list[dict[str, Any]], subject: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["subject"] != subject]


if __name__ == "__main__":
    main()
