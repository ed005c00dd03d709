"""Create the tables and figures of docs/performance.md from the saved results."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from acnml.cli._shared.drawing import panel
from acnml.plots import INK

Results = dict[str, Any]

TARGETS = {
    ("MLP 784-1200-1200-10", "diagonal: 5 exact steps"): "≤ 200",
    ("MLP 784-1200-1200-10", "Kronecker: 10 exact steps"): "≤ 200",
    ("MLP 784-1200-1200-10", "diagonal: linearised"): "≤ 25, and below BMA",
    ("VGG16", "diagonal: 5 exact steps"): "≤ 150",
    ("VGG16", "diagonal: linearised"): "≤ 40",
    ("ResNet-20", "diagonal: linearised"): "≤ 40",
    ("MLP 784-1200-1200-10", "last layer: linearised"): "≤ 1.5",
    ("ResNet-20", "last layer: linearised"): "≤ 1.5",
    ("VGG16", "last layer: linearised"): "≤ 1.5",
}


def cost_table(results: Results) -> str:
    """Return the table of costs of all methods on all networks."""
    lines = [
        "| network | posterior and method | ms per input | forward passes | target | the paper's "
        "loop takes |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in results["costs"]:
        key = row["subject"], row["method"]
        loop, milliseconds = _loop(results, row), 1000 * row["seconds"]
        lines.append(
            f"| {key[0]} | {key[1]} | {_number(milliseconds)} | {_number(row['forwards'])} | "
            f"{TARGETS.get(key, '')} | {'' if loop is None else f'{_number(loop)}×'} |"
        )
    return "\n".join(lines)


def gap_table(results: Results) -> str:
    """Return the table of optimality gaps."""
    names = list(results["gaps"][0]["gap"])
    lines = [f"| network | posterior | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for row in results["gaps"]:
        cells = " | ".join(f"{row['gap'][name]:.2g}" for name in names)
        lines.append(f"| {row['subject']} | {row['posterior']} | {cells} |")
    return "\n".join(lines)


def overview(results: Results) -> Figure:
    """Draw the cost of every method in forward passes, for all subjects that are not heads only."""
    networks = [r for r in results["costs"] if not r["subject"].startswith("head")]
    rows = [r for r in networks if r["method"] != "forward pass"]
    rows.sort(key=lambda r: r["forwards"])
    figure, axes = panel("Cost of one input, in forward passes", (8.6, 0.24 * len(rows) + 1))
    names = [f"{r['subject']}, {r['method']}" for r in rows]
    colours = ["#d55e00" if "paper" in n or "naive" in n else "#0072b2" for n in names]
    axes.barh(names, [r["forwards"] for r in rows], color=colours, height=0.7)
    axes.set_xscale("log")
    axes.grid(visible=False, axis="y")
    for y, row in enumerate(rows):
        axes.text(row["forwards"] * 1.1, y, _number(row["forwards"]), va="center", color=INK)
    return figure


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def growth(results: Results) -> Figure:
    """Draw costs against the number of classes."""
    figure, axes = panel("Cost of one input against the number of classes")
    for name, colour in (("whole network", "#0072b2"), ("last layer", "#009e73")):
        points = [r for r in results["classes"] if r["name"] == name]
        xy = [r["count"] for r in points], [1000 * r["seconds"] for r in points]
        axes.loglog(*xy, "o-", color=colour, label=name)
    axes.set(xlabel="classes", ylabel="milliseconds")
    axes.legend(frameon=False)
    return figure


def flatness(results: Results) -> Figure:
    """Draw costs against the size of the training set."""
    figure, axes = panel("Cost of one input against the training set")
    points = results["training images"]
    xy = [r["count"] for r in points], [1000 * r["seconds"] for r in points]
    axes.semilogx(*xy, "o-", color="#0072b2")
    axes.set(xlabel="training images", ylabel="milliseconds", ylim=(0, 1.5 * max(xy[1])))
    return figure


def _loop(results: Results, row: dict[str, Any]) -> float | None:
    """Return how many times longer the paper's loop takes for the same network and posterior."""
    name = f"{row['method'].split(':')[0]}: the paper's loop"
    loops = [
        r["seconds"]
        for r in results["costs"]
        if (r["subject"], r["method"]) == (row["subject"], name)
    ]
    return loops[0] / row["seconds"] if loops and "loop" not in row["method"] else None
