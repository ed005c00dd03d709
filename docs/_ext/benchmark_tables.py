"""Tables of what the benchmarks and the fuzz measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from results import Row, markdown, read, select
from values import measured

Table = Callable[[], str]


def made_by(module: str, function: str, file: str) -> Table:
    """Return a table that a function of a benchmark makes from its JSON file."""

    def table() -> str:
        make: Callable[[object], str] = getattr(import_module(f"benchmarks.{module}"), function)
        return make(measured(file))

    return table


def all_layers() -> str:
    """What the linearised network costs, beside its alternatives."""
    targets = {
        ("MLP 784-1200-1200-10", "diagonal: linearised network"): "≤ 14",
        ("MLP 784-1200-1200-10", "Kronecker: linearised network"): "≤ 18",
        ("MLP 784-1200-1200-10", "diagonal: five exact steps"): "≤ 215",
        ("ResNet-20", "diagonal: linearised network"): "≤ 24",
        ("ResNet-20", "Kronecker: linearised network"): "≤ 24",
        ("VGG16", "diagonal: linearised network"): "≤ 26",
        ("VGG16", "Kronecker: linearised network"): "≤ 26",
    }
    lines = [
        [
            row["network"],
            row["method"],
            f"{float(row['milliseconds']):.3g}",
            f"{float(row['forwards']):.3g}",
            targets.get((row["network"], row["method"]), ""),
            f"{float(row['megabytes']):.0f}",
        ]
        for row in read("measurements/all-layers.csv")
    ]
    head = ["network", "posterior and method", "ms per input", "forward passes", "target"]
    return markdown([*head, "peak MB"], lines, left=2)


def fuzz() -> str:
    """How many generated cases of every kind ended how."""
    rows = read("measurements/fuzz.csv")
    ends = ("equal", "flagged", "refused", "wrong")
    lines = [[row["kind"], *(f"{int(row[end]):,}" for end in ends)] for row in rows]
    return markdown([f"kind (commit {rows[0]['commit']})", *ends], lines)


def stragglers() -> str:
    """The time of a simulated cluster over the ideal time, if finished parts stay."""
    by_size: dict[str, list[Row]] = {}
    for row in select("measurements/stragglers.csv", parts_stay="yes"):
        by_size.setdefault(row["rows_per_task"], []).append(row)
    losses = [f"{float(row['losses']):g}" for row in next(iter(by_size.values()))]
    lines = [
        [f"{int(size):,}", *(f"{float(row['overhead']):.3f}" for row in own)]
        for size, own in by_size.items()
    ]
    return markdown(["rows per task", *_named(losses)], lines, left=0)


def _named(losses: Sequence[str]) -> list[str]:
    names = {"0": "no losses", "1": "1 loss per worker and hour"}
    return [names.get(each, f"{each} losses") for each in losses]


def serving() -> str:
    """Throughput and latency of a server, by model."""
    columns = {"requests_per_s": 0, "p50_ms": 1, "p99_ms": 1}
    lines = [
        [f"`{row['path']}`", *(f"{float(row[name]):.{n}f}" for name, n in columns.items())]
        for row in read("measurements/serving.csv")
    ]
    return markdown(["path", "requests/s", "p50, ms", "p99, ms"], lines)


def sliders() -> str:
    """How long the playground takes to follow a slider, and what it loads."""
    columns = {"p50_ms": 1, "p95_ms": 1, "computing_ms": 1, "first_load_mb": 1, "model_mb": 2}
    lines = [
        [row["data"], *(f"{float(row[name]):.{n}f}" for name, n in columns.items())]
        for row in read("measurements/playground.csv")
    ]
    head = [
        "network trained on",
        "p50",
        "p95",
        "computing",
        "first load, MB",
        "of it the model, MB",
    ]
    return markdown(head, lines)


def history() -> str:
    """The costs of predictions at the last five commits that were measured."""
    rows = read("measurements/history.csv")[-5:]
    names = [name for name in rows[0] if name not in ("commit", "date")]
    lines = [
        [f"`{row['commit']}`, {row['date']}", *(f"{float(row[name]):.1f}" for name in names)]
        for row in rows
    ]
    return markdown(["commit", *names], lines)


TABLES: dict[str, Table] = {
    "product": made_by("product", "product_table", "results.json"),
    "all-layers": all_layers,
    "costs": made_by("page", "cost_table", "results.json"),
    "gaps": made_by("page", "gap_table", "results.json"),
    "million-inputs": made_by("costs", "network_table", "results.json"),
    "scoring": made_by("costs", "scoring_table", "scoring.json"),
    "fuzz": fuzz,
    "stragglers": stragglers,
    "serving": serving,
    "sliders": sliders,
    "history": history,
}
