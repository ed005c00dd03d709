"""The toy study in a table and in one sentence: what the terminal and the report have in common.

Nothing here is written in advance: the words follow the numbers.
"""

from __future__ import annotations

from rich import box
from rich.table import Table

from studies.toy.study import CNMAP, METHODS, Findings

UNDECIDED = 0.05  # a mean confidence within this of one half is called no preference
CONFIDENCE, DISTANCE = "Mean confidence on the map", "Mean distance to CNMAP"


def penalty_name(l2: float) -> str:
    """Name a penalty."""
    return f"λ = {l2:g}"


def tables(findings: Findings) -> dict[str, dict[str, list[str]]]:
    """Return heading -> method -> a cell for every penalty."""
    penalties, others = findings.study.penalties, [m for m in METHODS if m != CNMAP]
    return {
        CONFIDENCE: {m: [f"{findings.confidence(m, p):.1%}" for p in penalties] for m in METHODS},
        DISTANCE: {m: [f"{findings.distance(m, p):.3f}" for p in penalties] for m in others},
    }


def closing_sentence(findings: Findings) -> str:
    """Say what becomes of every method's confidence far away from the data."""
    ends = {method: values[-1] for method, values in findings.rings.items()}
    doubtful = [method for method, end in ends.items() if end <= 0.5 + UNDECIDED]
    sure = [f"{method} is {end:.0%} sure" for method, end in ends.items() if method not in doubtful]
    start = f"At a distance of {findings.study.distances[-1]:g} from the data"
    if not sure:
        return f"{start}, no method prefers a class."
    if not doubtful:
        return f"{start}, every method still prefers a class: {listed(sure)}."
    verb = "no longer prefers" if len(doubtful) == 1 else "no longer prefer"
    return f"{start}, {listed(doubtful)} {verb} a class, while {listed(sure)}."


def grows_bolder(findings: Findings) -> bool:
    """Whether CNMAP's mean normaliser falls with every larger penalty, CNML's first."""
    values = [findings.normaliser(l2) for l2 in sorted(findings.exact)]
    return values == sorted(values, reverse=True)


def listed(items: list[str]) -> str:
    """Join words as one does in a sentence."""
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else items[0]


def results_table(findings: Findings) -> Table:
    """Return the numbers, one section per measure."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim")
    shown.add_column("")
    for l2 in findings.study.penalties:
        shown.add_column(penalty_name(l2), justify="right")
    for heading, rows in tables(findings).items():
        shown.add_row(f"[bold]{heading}[/bold]")
        for method, cells in rows.items():
            shown.add_row(f"  {method}", *cells)
        shown.add_section()
    return shown
