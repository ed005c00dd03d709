"""What the demo shows in a terminal when it is done: a table."""

from __future__ import annotations

from rich import box
from rich.table import Table

from acnml.cli._demo.study import Findings
from acnml.cli._demo.summary import COLUMNS, Cell, heading, table


def results_table(findings: Findings) -> Table:
    """Return the numbers, one section per angle, the best of each column in bold."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", title_justify="left")
    shown.add_column("")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for angle in findings.study.table_angles:
        shown.add_row(f"[bold]{heading(angle).capitalize()}[/bold]")
        for method, cells in table(findings, angle).items():
            shown.add_row(f"  {method}", *(_styled(cell) for cell in cells))
        shown.add_section()
    return shown


def _styled(cell: Cell) -> str:
    return f"[bold green]{cell.text}[/bold green]" if cell.best else cell.text
