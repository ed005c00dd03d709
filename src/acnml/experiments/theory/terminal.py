"""What the theory study shows in a terminal when it is done."""

from __future__ import annotations

from rich import box
from rich.table import Table

from acnml.experiments.theory.study import Findings
from acnml.experiments.theory.summary import COLUMNS, table


def results_table(findings: Findings) -> Table:
    """Return errors and bounds, a row per size."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0))
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for row in table(findings):
        shown.add_row(*row)
    return shown
