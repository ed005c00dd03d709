"""Create the tables and figures of docs/performance.md from the saved results."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from acnml.plots import INK, STYLE
from studies.drawing import panel

Results = dict[str, Any]

MLP = "MLP 784-1200-1200-10"
# Forward passes that were aimed at.
TARGETS = {
    (MLP, "diagonal: 5 exact steps"): "≤ 215",
    (MLP, "Kronecker: 10 exact steps"): "≤ 330",
    (MLP, "diagonal: linearised"): "≤ 22",
    (MLP, "diagonal: polished"): "≤ 70",
    ("ResNet-20", "diagonal: linearised"): "≤ 38",
    ("ResNet-20", "Kronecker: linearised"): "≤ 38",
    ("ResNet-20", "diagonal: 5 exact steps"): "≤ 150",
}


def cost_table(results: Results) -> str:
    """Return the table of costs of all methods; VGG16 is in the figure only."""
    lines = [
        "| network | posterior and method | ms per input | forward passes | target | peak MB | "
        "the paper's loop takes |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in results["costs"]:
        if row["subject"] == "VGG16":
            continue
        key = row["subject"], row["method"]
        loop, milliseconds = _loop(results, row), 1000 * row["seconds"]
        megabytes = row.get("megabytes")
        lines.append(
            f"| {key[0]} | {key[1]} | {_number(milliseconds)} | {_number(row['forwards'])} | "
            f"{TARGETS.get(key, '')} | "
            f"{'' if megabytes is None else f'{megabytes:,.0f}'} | "
            f"{'' if loop is None else f'{_number(loop)}×'} |"
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
    """Draw the cost of every method in forward passes, for all networks."""
    rows = [r for r in results["costs"] if "forward pass" not in r["method"]]
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
    """Draw forward passes against everything that may grow, measured and by arithmetic."""
    names = list(dict.fromkeys(row["axis"] for row in results["growth"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.4), layout="constrained")
        grid = figure.subplots(2, 3, sharey=True).flat
    for axes, name in zip(grid, names, strict=True):
        rows = [row for row in results["growth"] if row["axis"] == name]
        values = [row["value"] for row in rows]
        axes.loglog(values, [row["forwards"] for row in rows], "o-", color="#0072b2")
        axes.loglog(values, [row["predicted"] for row in rows], "--", color=INK)
        axes.set_title(name)
        axes.set_xticks(values, labels=[str(value) for value in values])
        axes.minorticks_off()
    grid[0].legend(["measured", "arithmetic"], frameon=False)
    figure.supylabel("forward passes")
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
