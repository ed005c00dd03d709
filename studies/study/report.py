"""What the reports of large studies have in common: their files, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from acnml import __version__
from acnml.cli._shared.files import write_file
from studies.study.figures import write_figures


def write_pages(
    folder: Path,
    figures: Mapping[str, Figure],
    markdown: str,
    page: Callable[[dict[str, str]], str],
) -> Path:
    """Write figures (PNG and SVG), results.md and report.html; return the page's path.

    Args:
        folder: where to.
        figures: by name.
        markdown: the main numbers.
        page: makes the page from the figures' SVG documents.
    """
    documents = write_figures(figures, folder)
    write_file(folder / "results.md", markdown.encode())
    return write_file(folder / "report.html", page(documents).encode())


def footer(study: str, seeds: Sequence[int]) -> str:
    """Say how a page was made."""
    return f"""<footer><p>Made by <code>acnml reproduce {study}</code>, acnml {__version__}.
Seeds {", ".join(map(str, seeds))}. Method: Zhou &amp; Levine, <em>Amortized
Conditional Normalized Maximum Likelihood</em>, ICML 2021.</p></footer>"""
