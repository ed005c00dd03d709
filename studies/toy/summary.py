"""The toy study's tables, closing sentence and claims, for the terminal and the report.

All of it follows the numbers.
"""

from __future__ import annotations

from rich import box
from rich.table import Table

from studies.engine.claims import Verdict
from studies.toy.study import CNMAP, METHODS, WHITE, ExactMaps, Findings

UNDECIDED = 0.05  # a mean confidence within this of one half counts as no preference
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


def closing_text(findings: Findings) -> str:
    """Describe every method's confidence far from the data."""
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


def claims(findings: Findings) -> list[Verdict]:
    """Judge what the paper's figures 1 to 3 show, and the same on overlapping classes."""
    cnml, (orange, blue) = findings.exact[0.0], findings.cnml_at_query
    uniform = max(orange, blue) <= 0.5 + UNDECIDED
    sure = findings.trained.at_query[1]
    return [
        Verdict(
            "Figure 1: CNML gives uniform predictions on most of the plane.",
            f"confidence below {WHITE:.0%} on more than half of the map",
            f"{cnml.white:.0%} of the map, mean confidence {cnml.confidence:.3f}",
            cnml.white > 0.5,
        ),
        Verdict(
            "Figure 2: CNML is near uniform at a query where the fit to the data is confident.",
            f"fit above 90%, CNML within {UNDECIDED:g} of one half",
            f"fit {sure:.1%} blue; CNML {orange:.0%} and {blue:.0%}",
            sure > 0.9 and uniform,
        ),
        _bolder("Figure 3", "separable classes", findings.exact),
        _bolder("Not in the paper", "overlapping classes", findings.overlapping),
    ]


def _bolder(figure: str, classes: str, maps: ExactMaps) -> Verdict:
    """Judge whether a larger λ makes CNMAP less conservative."""
    by_penalty = [maps[l2] for l2 in sorted(maps) if l2 > 0]
    confidence = [found.confidence for found in by_penalty]
    normaliser = [found.mean_normaliser for found in by_penalty]
    white = [found.white for found in by_penalty]
    rises, falls = confidence == sorted(confidence), normaliser[::-1] == sorted(normaliser)
    measured = ", ".join(
        f"{name} {' / '.join(f'{value:.3f}' for value in values)}"
        for name, values in (
            ("confidence", confidence),
            ("normaliser", normaliser),
            ("white share", white),
        )
    )
    penalties = " / ".join(f"{l2:g}" for l2 in sorted(maps) if l2 > 0)
    return Verdict(
        f"{figure}: with {classes}, CNMAP is less conservative as λ grows.",
        "mean confidence rises and mean normaliser falls with every larger λ",
        f"λ = {penalties}: {measured}",
        rises and falls,
    )


def listed(items: list[str]) -> str:
    """Join words with commas and “and”."""
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
