"""What the figures of studies share: looks, kinds of axes, the way into files and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from acnml.cli._shared.drawing import FAINT, INK, THEME, panel, to_png, to_svg
from acnml.cli._shared.files import write_file
from acnml.cli._shared.page import inline_svg

Point: TypeAlias = tuple[float, float]

DASHES = (0, (4, 2))
ORANGE, PINK, BLUE, GREEN = "#d55e00", "#cc79a7", "#0072b2", "#009e73"
SKY, AMBER, VIOLET, GREY = "#56b4e9", "#e69f00", "#7b5cc4", "#8a9099"
# The first four follow the page's light or dark scheme.
COLOURS = {ORANGE: "map", PINK: "bma", BLUE: "acnml", GREEN: "last-layer", **THEME}


class Look(NamedTuple):
    """A label, a colour of Okabe and Ito's palette (or near it), and a marker."""

    label: str
    colour: str
    marker: str


def reliability_panel(title: str) -> tuple[Figure, Axes]:
    """Return axes for accuracy against confidence, with the diagonal of honest confidences."""
    figure, axes = panel(title, (3.1, 3.0))
    axes.plot([0, 1], [0, 1], color=FAINT, linestyle=DASHES, linewidth=1)
    axes.set(xlim=(0, 1.03), ylim=(0, 1.03), xlabel="confidence", ylabel="accuracy")
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([0.5, 1])
    axes.set_aspect("equal")
    return figure, axes


def draw_trade_off(
    axes: Axes, paths: Mapping[Look, Sequence[Point]], plain: float | None, span: float
) -> None:
    """Draw ECE under a shift against the NLL of ordinary images, a path per family.

    Args:
        axes: to draw on.
        paths: the points (NLL, ECE) of each family whose knob turns.
        plain: the NLL of the plain network, marked by a line where it is known.
        span: how many times that NLL the axis reaches to.
    """
    for look, points in paths.items():
        nlls, eces = zip(*points, strict=True)
        axes.plot(nlls, eces, look.marker, linestyle="-", color=look.colour, label=look.label)
    if plain is not None:
        axes.axvline(plain, color=FAINT, linestyle=DASHES, linewidth=1)
        axes.set_xlim(0.93 * min(nll for path in paths.values() for nll, _ in path), span * plain)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.2g}")
    axes.xaxis.set_minor_formatter("{x:.2g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ECE")


def legend_below(figure: Figure, columns: int = 3) -> None:
    """Put the legend of the first axes below the figure, where there is something to name."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        style: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": INK}
        figure.legend(loc="outside lower center", ncols=columns, **style)


def write_figures(drawn: Mapping[str, Figure], folder: Path) -> dict[str, str]:
    """Write all figures as SVG and PNG, and return the SVG documents."""
    documents = {name: to_svg(figure) for name, figure in drawn.items()}
    for name, figure in drawn.items():
        write_file(folder / f"{name}.svg", documents[name].encode())
        figure.set_facecolor("white")  # a picture has no page around it
        write_file(folder / f"{name}.png", to_png(figure))
    return documents


def svg(name: str, document: str) -> str:
    """Put a figure inline, in the page's colours."""
    return inline_svg(document, name, name.replace("-", " "), COLOURS)


def panels(documents: Mapping[str, str], prefix: str) -> str:
    """Put all figures inline whose names begin so."""
    return "".join(svg(name, documents[name]) for name in documents if name.startswith(prefix))
