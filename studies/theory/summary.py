"""The theory study's table, closing sentence and claims, for the terminal and the report.

All of it follows the numbers.
"""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from studies.engine.claims import Verdict
from studies.theory.study import ACNML, INFLUENCE, MAP, METHODS, Findings, Measured

STEEP = -1.8  # a slope at least this steep is called n⁻²
COLUMNS = (
    "n",
    "MAP",
    "influence",
    "Thm 3.1",
    "sharper",
    "ACNML",
    "sharper",
    "log p, infl.",
    "Prop 3.2",
    "log p",
    "sharper",
)
IN_TERMINAL = (0, 1, 2, 3, 4, 5, 6, 9, 10)


def values(measured: Measured) -> list[float]:
    """Return the numbers of a size, in the order of `COLUMNS` after n."""
    weights, log_probs = measured.parameter_errors, measured.log_prob_errors
    return [
        weights[MAP],
        weights[INFLUENCE],
        measured.theorem_bound.largest,
        measured.influence_bound.largest,
        weights[ACNML],
        measured.acnml_bound.largest,
        log_probs[INFLUENCE],
        measured.proposition_bound.largest,
        log_probs[ACNML],
        measured.log_prob_bound.largest,
    ]


def table(findings: Findings) -> list[list[str]]:
    """Return a row of cells per size, in the order of `COLUMNS`."""
    return [[f"{m.n:,}", *map(number, values(m))] for m in findings.measured]


def closing_text(findings: Findings) -> str:
    """Say how fast the errors fall, and whether the bounds hold."""
    slope, baseline = findings.log_prob_slope(ACNML), findings.log_prob_slope(MAP)
    verdict = "as the theory says" if slope <= STEEP else "less than the theory says"
    return (
        f"ACNML’s error against exact CNMAP falls like {power(slope)}, {verdict}, where without "
        f"adapting it falls like {power(baseline)}; {bounds_verdict(findings)}."
    )


def claims(findings: Findings) -> list[Verdict]:
    """Judge what section 3.2 of the paper says, in the paper's form and in the sharper one."""
    return [
        _rate(findings),
        _theorem(findings),
        _printed(findings),
        _proposition(findings),
        _sharper(findings),
    ]


def _rate(findings: Findings) -> Verdict:
    weights, log_probs = (
        ", ".join(f"{method} {power(slope(method))}" for method in METHODS)
        for slope in (findings.parameter_slope, findings.log_prob_slope)
    )
    return Verdict(
        "The error of the approximation decays like n⁻².",
        f"slopes of the influence function and of ACNML at most {STEEP:g}",
        f"weights: {weights}; log-probabilities: {log_probs}",
        all(findings.parameter_slope(method) <= STEEP for method in (INFLUENCE, ACNML)),
    )


def _theorem(findings: Findings) -> Verdict:
    start, last = findings.theorem_from, findings.measured[-1]
    broken = sum(m.theorem_bound.broken for m in findings.measured)
    measured = (
        "its condition fails for some query at every n"
        if start is None
        else f"its condition holds for every query from n = {start:,} on; at n = {last.n:,} the "
        f"bound is at least {last.theorem_bound.tightest:,.0f} times the error"
    )
    return Verdict(
        "Theorem 3.1 bounds the error of the influence function (N = n + 2, ½ in Δ_δ).",
        "its condition is met for all queries at some n, and no error is above its bound",
        f"{measured}; {broken} errors above a bound",
        start is not None and not broken,
    )


def _printed(findings: Findings) -> Verdict:
    met = [f"{m.printed_bound.proven:.0%}" for m in (findings.measured[0], findings.measured[-1])]
    return Verdict(
        "Theorem 3.1 as printed, with 1/n in Δ_δ: a slip, by which its condition is empty.",
        "met by all queries at some n",
        f"met by {met[0]} of queries and labels at the smallest n, and by {met[1]} at the largest",
        any(m.printed_bound.proven == 1 for m in findings.measured),
    )


def _proposition(findings: Findings) -> Verdict:
    last = findings.measured[-1]
    broken = sum(m.proposition_bound.broken for m in findings.measured)
    return Verdict(
        "Proposition 3.2 bounds the error of the log-probabilities, with L = ‖x‖ and Theorem 3.1.",
        "no error is above its bound",
        f"at n = {last.n:,} the bound is at least {last.proposition_bound.tightest:,.0f} times the "
        f"error; {broken} errors above a bound",
        broken == 0,
    )


def _sharper(findings: Findings) -> Verdict:
    last, both = findings.measured[-1], ("influence_bound", "acnml_bound")
    proven = [getattr(m, name).proven == 1 for m in findings.measured for name in both]
    return Verdict(
        "Beyond the paper: for a convex loss, sharper bounds hold under weaker conditions.",
        "proven for all queries at every n, and no error above its bound",
        f"at n = {last.n:,} as close as {last.influence_bound.tightest:.1f} (influence function) "
        f"and {last.acnml_bound.tightest:.1f} (ACNML) times an error; {bounds_verdict(findings)}",
        all(proven) and not findings.broken,
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


def results_table(findings: Findings) -> Table:
    """Return errors and bounds, a row per size; a terminal has no room for all of them."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0))
    for column in IN_TERMINAL:
        shown.add_column(COLUMNS[column], justify="right")
    for row in table(findings):
        shown.add_row(*(row[column] for column in IN_TERMINAL))
    return shown
