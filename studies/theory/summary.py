"""The theory study in a table and in one sentence: what terminal and report have in common.

Nothing here is written in advance: the words follow the numbers.
"""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from studies.theory.study import ACNML, INFLUENCE, MAP, Findings, Measured

STEEP = -1.8  # a slope at least this steep is called n⁻²
COLUMNS = (
    "n",
    "MAP",
    "influence",
    "bound",
    "Thm 3.1",
    "ACNML",
    "bound",
    "log p",
    "Prop 3.2",
)


def table(findings: Findings) -> list[list[str]]:
    """Return a row of cells per size, in the order of `COLUMNS`."""
    return [_row(measured) for measured in findings.measured]


def closing_sentence(findings: Findings) -> str:
    """Say how fast the errors fall, and whether the bounds hold."""
    slope, baseline = findings.log_prob_slope(ACNML), findings.log_prob_slope(MAP)
    verdict = "as the theory says" if slope <= STEEP else "less than the theory says"
    return (
        f"ACNML’s error against exact CNMAP falls like {power(slope)}, {verdict}, where without "
        f"adapting it falls like {power(baseline)}; {bounds_verdict(findings)}."
    )


def bounds_verdict(findings: Findings) -> str:
    """Say whether any error was above its bound."""
    if findings.broken:
        return f"{findings.broken} errors are above their bounds, which should not be"
    return "no error is above its bound"


def power(slope: float) -> str:
    """Write n to a power, with the power above the line."""
    return "n" + f"{slope:.2f}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def number(value: float) -> str:
    """Write a number short, and an infinite bound as none."""
    if not math.isfinite(value):
        return "none"
    if 0.001 <= value < 1000:
        return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _row(measured: Measured) -> list[str]:
    errors = measured.parameter_errors
    values = (
        errors[MAP],
        errors[INFLUENCE],
        measured.influence_bound.largest,
        measured.theorem_bound.largest,
        errors[ACNML],
        measured.acnml_bound.largest,
        measured.log_prob_errors[ACNML],
        measured.log_prob_bound.largest,
    )
    return [f"{measured.n:,}", *(number(value) for value in values)]


def results_table(findings: Findings) -> Table:
    """Return errors and bounds, a row per size."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0))
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for row in table(findings):
        shown.add_row(*row)
    return shown
