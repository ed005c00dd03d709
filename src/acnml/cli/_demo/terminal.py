"""The demo's table for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from acnml.cli._demo.study import Findings
from acnml.cli._demo.summary import COLUMNS, Cell, price_text, table


def results_table(findings: Findings) -> Table:
    """Return the numbers, upright and shifted; the best of each column is in bold."""
    shown = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="dim", title_justify="left"
    )
    shown.add_column("", no_wrap=True)
    shown.add_column("price", justify="right")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for i, group in enumerate(table(findings)):
        shown.add_row(f"[bold]{group.title}[/bold]")
        for method, cells in group.rows.items():
            price = "" if i else price_text(findings, method)  # once is enough
            shown.add_row(f"  {method}", price, *(_styled(cell) for cell in cells))
        shown.add_section()
    return shown


def _styled(cell: Cell) -> str:
    text = f"[bold green]{cell.text}[/bold green]" if cell.best else cell.text
    return f"{text} [dim]± {cell.spread}[/dim]"
