"""The cost of a million inputs by network and by classes, from benchmarks/results.json.

The build of the documentation inserts both tables into docs/scale.md; this prints them:

python -m benchmarks.costs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
MILLION = 10**6


def network_table(results: dict[str, Any]) -> str:
    """Return a row per network: CPU time of one thread for a forward pass and for ACNML."""
    seconds = {(row["subject"], row["method"]): row["seconds"] for row in results["costs"]}
    rows = ["| network | forward pass | ACNML, last layer | ratio |", "|---|---:|---:|---:|"]
    for (subject, method), head in seconds.items():
        if method == "last layer: linearised":
            forward = seconds[subject, "forward pass"]
            rows.append(f"| {subject} | {_time(forward)} | {_time(head)} | {head / forward:.2f} |")
    return "\n".join(rows)


def class_table(results: dict[str, Any]) -> str:
    """Return a row per number of classes: the time of the head alone."""
    cases = {row["case"]: row["value"] / 1000 for row in results["last layer"]}
    names = [name for name in cases if name.startswith("trained head") and "α" not in name]
    rows = ["| classes | α = 0.3: every label matters | α = 0.003 |", "|---:|---:|---:|"]
    rows += [
        f"| {name.split(', ')[1].removesuffix(' classes')} | {_time(cases[name])} | "
        f"{_time(cases[f'{name}, α = 0.003'])} |"
        for name in names
    ]
    return "\n".join(rows)


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
    print(f"{network_table(results)}\n\n{class_table(results)}")


if __name__ == "__main__":
    main()
