"""Tables as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells in columns, aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    chosen: Collection[int],
    notes: Sequence[str],
) -> str:
    """Return a table with notes below it; all text is escaped.

    Args:
        head: names of the columns.
        rows: cells; the first of a row names it.
        chosen: indices of rows in bold.
        notes: paragraphs.
    """
    left, right = (f' style="text-align: {side}"' for side in ("left", "right"))
    titles = "".join(
        f"<th{right if i else left}>{escape(name)}</th>" for i, name in enumerate(head)
    )
    body = ""
    for index, row in enumerate(rows):
        cells = [f"<b>{escape(c)}</b>" if index in chosen else escape(c) for c in row]
        body += "<tr>" + "".join(
            f"<td{right if i else left}>{cell}</td>" for i, cell in enumerate(cells)
        )
        body += "</tr>"
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{below}"
