"""What the toy study shows in a terminal when it is done."""

from __future__ import annotations

from rich import box
from rich.table import Table

from acnml.experiments.toy.study import Findings
from acnml.experiments.toy.summary import penalty_name, tables


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
