"""The tables about decisions, computed from docs/results/decisions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from results import Row, lowest_bold, markdown, read, select
from studies.evidence.settings import TITLES

FAILURES, AUTOMATIC = "decisions/failures.csv", "decisions/automatic.csv"
WIDELY, SETS = "decisions/widely.csv", "decisions/sets.csv"
ALARMS, FALSE_ALARMS = "decisions/alarms.csv", "decisions/false_alarms.csv"

NAMES = {
    "digits": "digits",
    "resnet20": "CIFAR-10",
    "elec": "prices (Elec2)",
    "weather": "weather",
}
MONITOR, KS = "monitor", "KS test of every window"


def mean(rows: Sequence[Row], column: str) -> str:
    """Return the mean of a column as text."""
    return f"{statistics.fmean(float(row[column]) for row in rows):.3f}"


def groups(file: str) -> list[tuple[str, str]]:
    """Return networks and groups of shifts, in their order."""
    return list(dict.fromkeys((row["network"], row["group"]) for row in read(file)))


def titles(found: Sequence[tuple[str, str]]) -> list[str]:
    """Return the heads of their columns."""
    return [f"{NAMES.get(network, network)}: {group}" for network, group in found]


def failures() -> str:
    """How often thresholds fail, and which share they accept."""
    lines = []
    for network in dict.fromkeys(row["network"] for row in read(FAILURES)):
        for risk in dict.fromkeys(row["risk"] for row in read(FAILURES)):
            own = {
                kind: select(FAILURES, network=network, risk=risk, threshold=kind, method="ACNML")
                for kind in ("certified", "plug-in")
            }
            cells = [
                mean(rows, column) for rows in own.values() for column in ("above", "coverage")
            ]
            lines.append([NAMES.get(network, network), f"{100 * float(risk):g} %", *cells])
    head = ["data", "risk", "certified: fails", "accepts", "plug-in: fails", "accepts"]
    return markdown(head, lines, left=2)


def wrong() -> str:
    """Accepted and wrong, at equal clean coverage."""
    found = groups(AUTOMATIC)
    lines = [
        [
            method,
            *(
                mean(
                    select(
                        AUTOMATIC,
                        network=network,
                        group=group,
                        method=method,
                        threshold="equal clean coverage",
                    ),
                    "wrong",
                )
                for network, group in found
            ),
        ]
        for method in dict.fromkeys(row["method"] for row in read(AUTOMATIC))
    ]
    return markdown(["confidence of", *titles(found)], lines)


def accuracy() -> str:
    """Mean absolute error of the estimated accuracy under the shifts of every network."""
    rows = [row for row in read(WIDELY) if row["group"] != "clean"]
    methods = [method for method in dict.fromkeys(r["method"] for r in rows) if method != "network"]
    lines, columns = [], dict[str, list[float]]()
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        values = [_over_shifts([r for r in own if r["method"] == m], "error") for m in methods]
        for method, value in zip(methods, values, strict=True):
            columns.setdefault(method, []).append(value)
        lines.append([{**TITLES, **NAMES}.get(network, network), *lowest_bold(values)])
    means = [statistics.fmean(columns[method]) for method in methods]
    return markdown(["", *methods], [*lines, ["mean", *lowest_bold(means)]])


def held(method: str) -> float:
    """Return the share of shifts in which the interval of the accuracy holds the true one."""
    rows = select(WIDELY, method=method)
    return _over_shifts([row for row in rows if row["group"] != "clean"], "held")


def _over_shifts(rows: Sequence[Row], column: str) -> float:
    """Return the mean over shifts of a column of means over groups."""
    shifts = [int(row["shifts"]) for row in rows]
    return sum(n * float(row[column]) for n, row in zip(shifts, rows, strict=True)) / sum(shifts)


def sets() -> str:
    """Coverage and size of conformal sets."""
    found, lines = groups(SETS), []
    for method, kind in dict.fromkeys((r["method"], r["thresholds"]) for r in read(SETS)):
        parts = [
            select(SETS, network=network, group=group, method=method, thresholds=kind)
            for network, group in found
        ]
        cells = [f"{mean(part, 'coverage')}, {float(mean(part, 'size')):.2f}" for part in parts]
        lines.append([method, kind, *cells])
    return markdown(["probabilities", "thresholds", *titles(found)], lines, left=2)


def false_alarms() -> str:
    """Share of quiet streams with an alarm."""
    lines = []
    for stream in dict.fromkeys(row["stream"] for row in read(FALSE_ALARMS)):
        rows = (select(FALSE_ALARMS, stream=stream, test=test) for test in (MONITOR, KS))
        lines.append([_name(stream), *(mean(own, "alarms") for own in rows)])
    return markdown(["inputs like", MONITOR, KS], lines)


def delays() -> str:
    """Inputs from the change to the alarm: of one stream, or the median and maximum of several."""
    names = dict.fromkeys(_name(row["stream"]) for row in read(ALARMS))
    lines = []
    for name in names:
        cells = []
        for test in (MONITOR, KS):
            own = [r for r in select(ALARMS, test=test) if _name(r["stream"]) == name]
            cells.append(_delay(own))
        lines.append([name, *cells])
    return markdown(["stream", MONITOR, KS], lines)


def _delay(rows: Sequence[Row]) -> str:
    false = sum(row["is_false"] == "True" for row in rows)
    known = [float(r["delay"]) for r in rows if r["delay"] not in ("", "nan")]
    missed = len(rows) - false - len(known)
    text = f"{statistics.median(known):,.0f}" if known else ""
    text += f" ({max(known):,.0f})" if len(known) > 1 else ""
    text += f"; {false} of {len(rows)} false" if false else ""
    return (text + (f"; {missed} of {len(rows)} missed" if missed else "")).lstrip("; ")


def _name(stream: str) -> str:
    name = stream.split(":")[0]
    return NAMES.get(name, name)


TABLES: dict[str, Callable[[], str]] = {
    "decisions-failures": failures,
    "decisions-wrong": wrong,
    "decisions-accuracy": accuracy,
    "decisions-sets": sets,
    "decisions-false-alarms": false_alarms,
    "decisions-delays": delays,
}
