"""How methods look in figures, and how figures get into files and pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from acnml.experiments.drawing import INK, THEME, to_png, to_svg
from acnml.experiments.files import write_file
from acnml.experiments.page import inline_svg

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
