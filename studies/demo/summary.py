"""The demo's table and its verdict, which the terminal and the report share.

Every sentence is computed from the numbers. If ACNML does not win, the verdict says so.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.table import Table

from studies.demo.study import ACNML, BMA, EQUAL, METHODS, NETWORK, PRICE, RIVALS, Findings, Summary

COLUMNS = ("accuracy", "NLL", "ECE")
SHORT = {EQUAL: "a plain temperature", BMA: "BMA"}  # the rivals' names in sentences

# A smaller difference is called none, as is one that not all networks agree on.
CLEARLY = {"ece": 0.01, "nll": 0.05}


class Cell(NamedTuple):
    """A number as it is shown, its spread between networks, and whether it is the best."""

    text: str
    spread: str
    best: bool


class Group(NamedTuple):
    """A part of the table: a title, and a row of cells for each method."""

    title: str
    rows: dict[str, list[Cell]]
    has_prices: bool  # prices are the same for all digits, and are shown once


def table(findings: Findings) -> list[Group]:
    """Return the table: upright and shifted test digits, cells in the order of `COLUMNS`."""
    first, last = findings.study.shifted_angles[0], findings.study.shifted_angles[-1]
    return [
        Group("Upright digits", _rows(findings.upright), has_prices=True),
        Group(f"Rotated by {first}° to {last}°", _rows(findings.shifted), has_prices=False),
    ]


def price_text(findings: Findings, method: str) -> str:
    """Return what a method costs on validation digits, against the best temperature."""
    return f"{findings.price(method):+.3f}"


def verdict(findings: Findings) -> str:
    """Say in one sentence who is better calibrated on shifted digits, and at what price."""
    ece = {method: f"{findings.shifted(method, 'ece').mean:.2f}" for method in METHODS}
    rivals = f"{ece[EQUAL]} for a plain temperature and {ece[BMA]} for BMA at the same price"
    where = f"on digits rotated by {findings.study.shifted_from}° or more"
    price = f"for {PRICE:g} nats of NLL on upright digits"
    beaten = [rival for rival in RIVALS if clearly_lower(findings, "ece", rival)]
    if len(beaten) == len(RIVALS):
        return (
            f"ACNML wins here: {price} it lowers the calibration error (ECE) {where} from "
            f"{ece[NETWORK]} to {ece[ACNML]}, against {rivals}."
        )
    if beaten:
        other = next(rival for rival in RIVALS if rival not in beaten)
        return (
            f"ACNML beats {SHORT[beaten[0]]} but not {SHORT[other]} here: {price} its calibration "
            f"error (ECE) {where} is {ece[ACNML]}, against {rivals}."
        )
    return (
        f"ACNML does not win here: {price} its calibration error (ECE) {where} is {ece[ACNML]}, "
        f"against {rivals}."
    )


def closing_text(findings: Findings) -> str:
    """Return what the terminal shows below the table."""
    paragraphs = [
        verdict(findings),
        nll_sentence(findings),
        cost_sentence(findings),
        "What acnml.calibrate prints for the first network:",
        findings.runs[0].chosen.table,
    ]
    return "\n\n".join(paragraphs)


def clearly_lower(findings: Findings, score: str, rival: str) -> bool:
    """Whether ACNML has a lower score than a rival on shifted digits, for every network."""
    gains = _gains(findings, score, rival)
    return min(gains) > 0 and fmean(gains) > CLEARLY[score]


def nll_sentence(findings: Findings) -> str:
    """Compare the NLL on shifted digits, which a method cannot lower by caution alone."""
    nll = {method: f"{findings.shifted(method, 'nll').mean:.2f}" for method in METHODS}
    against = " and ".join(
        f"{_nll_relation(findings, rival)} that of {SHORT[rival]} ({nll[rival]})"
        for rival in RIVALS
    )
    return (
        f"The NLL of ACNML on rotated digits, {nll[ACNML]}, is {against}; the network has "
        f"{nll[NETWORK]}."
    )


def _nll_relation(findings: Findings, rival: str) -> str:
    if clearly_lower(findings, "nll", rival):
        return "lower than"
    gains = _gains(findings, "nll", rival)
    if max(gains) < 0 and fmean(gains) < -CLEARLY["nll"]:
        return "higher than"
    return "not clearly different from"


def _gains(findings: Findings, score: str, rival: str) -> list[float]:
    """Return by how much ACNML's score is lower than a rival's, for every network."""
    angles = findings.study.shifted_angles
    own, other = (findings.each(method, score, angles) for method in (ACNML, rival))
    return [theirs - ours for ours, theirs in zip(own, other, strict=True)]


def cost_sentence(findings: Findings) -> str:
    """Say what ACNML changes on upright test digits."""
    before, after = (
        {score: findings.upright(method, score).mean for score in ("accuracy", "nll", "ece")}
        for method in (NETWORK, ACNML)
    )
    return (
        f"On upright test digits the accuracy is {after['accuracy']:.1%} with ACNML and "
        f"{before['accuracy']:.1%} without; the NLL is {after['nll']:.3f} and {before['nll']:.3f}, "
        f"the ECE {after['ece']:.3f} and {before['ece']:.3f}."
    )


def _rows(summary: Callable[[str, str], Summary]) -> dict[str, list[Cell]]:
    columns = [_cells(column, [summary(m, column.lower()) for m in METHODS]) for column in COLUMNS]
    return {method: list(row) for method, *row in zip(METHODS, *columns, strict=True)}


def _cells(column: str, summaries: list[Summary]) -> list[Cell]:
    """Return a column; numbers that look alike are marked alike."""
    if column == "accuracy":
        shown, best = [(f"{s.mean:.1%}", f"{s.spread:.1%}") for s in summaries], max
    else:
        shown, best = [(f"{s.mean:.3f}", f"{s.spread:.3f}") for s in summaries], min
    top = best((text for text, _ in shown), key=lambda text: float(text.rstrip("%")))
    return [Cell(text, spread, text == top) for text, spread in shown]


def results_table(findings: Findings) -> Table:
    """Return the table for the terminal; the best of each column is in bold."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="dim")
    shown.add_column("", no_wrap=True)
    for column in ("price", *COLUMNS):
        shown.add_column(column, justify="right")
    for group in table(findings):
        shown.add_row(f"[bold]{group.title}[/bold]")
        for method, cells in group.rows.items():
            price = price_text(findings, method) if group.has_prices else ""
            shown.add_row(f"  {method}", price, *(_styled(cell) for cell in cells))
        shown.add_section()
    return shown


def _styled(cell: Cell) -> str:
    text = f"[bold green]{cell.text}[/bold green]" if cell.best else cell.text
    return f"{text} [dim]± {cell.spread}[/dim]"
