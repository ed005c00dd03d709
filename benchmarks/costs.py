"""The tables of docs/scale.md: costs of a million inputs, and scoring against its targets.

The build of the documentation inserts all tables into the page; this prints them:

python -m benchmarks.costs

The costs are computed from benchmarks/results.json, which `make bench` writes, and the others from
benchmarks/scoring.json, which `python -m benchmarks.scoring` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
SCORING = Path(__file__).parent / "scoring.json"
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
    rows = ["| classes | α = 0.3: many labels matter | α = 0.003 |", "|---:|---:|---:|"]
    rows += [
        f"| {name.split(', ')[1].removesuffix(' classes')} | {_time(cases[name])} | "
        f"{_time(cases[f'{name}, α = 0.003'])} |"
        for name in names
    ]
    return "\n".join(rows)


def scoring_table(results: dict[str, Any]) -> str:
    """Return a row per measurement of scoring and fitting: by wall time, by CPU time, target."""
    share, speed = "share of the loop's throughput", "speed-up"
    local, long, ray, fit = (results[name] for name in ("local", "long", "ray", "fit"))
    actors, alone = ray["two Ray actors"], ray["local, two threads"]
    of_ray = ray["share of the local throughput"]
    seconds, peak = long["acnml predict"]["wall"], long["acnml predict"]["peak_mb"]
    rows = [
        (f"`acnml predict`, {local['rows']:,} rows", *_ratios(local[share]), "≥ 0.85"),
        (
            f"`acnml predict`, {long['rows']:,} rows, {seconds:.0f} s",
            *_ratios(long[share]),
            "≥ 0.85",
        ),
        ("its peak memory", f"{peak:.0f} MB", "", "< 1.5 GB"),
        (f"two Ray actors, {ray['rows']:,} rows", f"{of_ray['whole run']:.2f}", "", "≥ 0.9"),
        ("in the steady state", f"{of_ray['steady state']:.2f}", "", ""),
        ("start of the actors", f"{actors['start']:.1f} s", "", ""),
        ("start of the local process", f"{alone['start']:.1f} s", "", ""),
        (f"fit in two processes, {fit['rows']:,} rows", *_ratios(fit[speed]), "≥ 1.6"),
    ]
    head = ["| | wall time | CPU time | target |", "|---|---:|---:|---:|"]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def _ratios(found: dict[str, float]) -> tuple[str, str]:
    return f"{found['wall']:.2f}", f"{found['cpu']:.2f}"


def _time(seconds: float) -> str:
    """Return the time of a million inputs."""
    total = seconds * MILLION
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if total >= size:
            return f"{total / size:.1f} {unit}"
    return f"{total:.0f} s"


def main() -> None:
    """Print all tables."""
    results = json.loads(RESULTS.read_text())
    scoring = json.loads(SCORING.read_text())
    print(network_table(results), class_table(results), scoring_table(scoring), sep="\n\n")


if __name__ == "__main__":
    main()
