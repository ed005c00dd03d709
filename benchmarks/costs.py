"""Print the cost of a million inputs by network and by classes, from benchmarks/results.json.

python -m benchmarks.costs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
MILLION = 10**6


def network_rows(results: dict[str, Any]) -> list[str]:
    """Return a row per network: hours of two cores for a forward pass and for ACNML."""
    seconds = {(row["subject"], row["method"]): row["seconds"] for row in results["costs"]}
    rows = []
    for (subject, method), head in seconds.items():
        if method == "last layer: linearised":
            forward = seconds[subject, "forward pass"]
            rows.append(f"| {subject} | {_time(forward)} | {_time(head)} | {head / forward:.2f} |")
    return rows


def class_rows(results: dict[str, Any]) -> list[str]:
    """Return a row per number of classes: the time of the head alone."""
    cases = {row["case"]: row["value"] / 1000 for row in results["last layer"]}
    names = [name for name in cases if name.startswith("trained head") and "α" not in name]
    return [
        f"| {name.split(', ')[1].removesuffix(' classes')} | {_time(cases[name])} | "
        f"{_time(cases[f'{name}, α = 0.003'])} |"
        for name in names
    ]


def _time(seconds: float) -> str:
    """Return the time of a million inputs."""
    total = seconds * MILLION
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if total >= size:
            return f"{total / size:.1f} {unit}"
    return f"{total:.0f} s"


def main() -> None:
    """Print both tables."""
    results = json.loads(RESULTS.read_text())
    print("| network | forward pass | ACNML, last layer | ratio |\n|---|---:|---:|---:|")
    print("\n".join(network_rows(results)))
    print("\n| classes | α = 0.3: every label matters | α = 0.003 |\n|---:|---:|---:|")
    print("\n".join(class_rows(results)))


if __name__ == "__main__":
    main()
