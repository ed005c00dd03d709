"""How figures look and become bytes: one style, no pyplot, no global state.

The style's colours INK, FAINT and PAPER are turned into the page's CSS variables by
`page.inline_svg`, so that figures follow the reader's light or dark scheme.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from acnml.plots import FAINT, INK, PAPER, STYLE

THEME = {INK: "ink", FAINT: "faint", PAPER: "paper"}  # colour -> CSS variable of the page
PANEL = (4.7, 3.3)  # inches


def panel(title: str, size: tuple[float, float] = PANEL) -> tuple[Figure, Axes]:
    """Return a figure with one titled pair of axes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
    return figure, axes


def halo(colour: str) -> dict[str, Any]:
    """Text in a colour, with a halo that keeps it readable where it crosses a line."""
    stroke = [withStroke(linewidth=3, foreground=PAPER)]
    return {"textcoords": "offset points", "color": colour, "path_effects": stroke}


def label_ends(axes: Axes, x: float, ends: Mapping[str, float], colours: Mapping[str, str]) -> None:
    """Write names right of where lines end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    for name, y in spread(ends, gap=0.085 * (high - low)).items():
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(name, (x, y), (8, 0), color=colours[name], **place)


def spread(values: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move values apart until neighbours are `gap` from each other; what is apart stays."""
    moved = dict(values)
    names = sorted(moved, key=lambda name: moved[name])
    for _ in range(100):
        for lower, upper in pairwise(names):
            push = max(0.0, gap - (moved[upper] - moved[lower])) / 2
            moved[lower], moved[upper] = moved[lower] - push, moved[upper] + push
    return moved


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG document without date or creator."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return buffer.getvalue()


def to_png(figure: Figure, dots_per_inch: int = 120) -> bytes:
    """Return a figure as a PNG image."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=dots_per_inch)
    return buffer.getvalue()
