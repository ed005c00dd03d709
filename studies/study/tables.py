"""Numbers as text: CSV files, Markdown tables, rows of HTML, means with their spread."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from acnml.cli._shared.files import write_file

METHOD = ("method", "posterior", "solver", "knob")
SCORES = ("seed", "shift", "n", "accuracy", "nll", "brier", "ece", "seconds_per_input")
METRICS = ("study", *METHOD, *SCORES)  # the columns of every study's metrics.csv
TITLES = {"ece": "Calibration error (ECE)", "brier": "Brier score", "accuracy": "Accuracy"}
TITLES |= {"nll": "NLL"}  # of the scores that are drawn
SHOWN_MISSING = 12


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; numbers keep six digits."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows([f"{c:.6g}" if isinstance(c, float) else c for c in row] for row in rows)
    write_file(path, text.getvalue().encode())


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def html_row(head: str, cells: Sequence[str]) -> str:
    """Return a row of a table on a page."""
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(head)}</th>{columns}</tr>'


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation over seeds, 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± std as text, and a dash where there is nothing."""
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def unfinished_html(names: Sequence[str]) -> str:
    """Say on a page what is not finished, if anything."""
    if not names:
        return ""
    listed = ", ".join(escape(name) for name in names[:SHOWN_MISSING])
    rest = len(names) - SHOWN_MISSING
    more = f", and what depends on them, and {rest} more" if rest > 0 else ""
    return (
        f"<p><strong>Not finished:</strong> {listed}{more}. Run the same command again "
        "to go on; numbers and figures below leave them out.</p>"
    )
