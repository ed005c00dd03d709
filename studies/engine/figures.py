"""Figures of studies: functions of `Results`, drawn without pyplot in the style of all pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from acnml.plots import BLUE, DASHES, FAINT, GREEN, INK, ORANGE, PINK, frame_of_reliability
from studies.drawing import THEME, panel, to_png, to_svg
from studies.engine.method import ACNML, Look, Method
from studies.engine.results import Results
from studies.engine.tables import mean_std
from studies.files import write_file
from studies.page import inline_svg

SKY, AMBER, VIOLET, GREY = "#56b4e9", "#e69f00", "#7b5cc4", "#8a9099"
MUSTARD = "#b88a00"
# These follow the page's light or dark scheme.
METHOD_COLOURS = {
    ORANGE: "map",
    PINK: "bma",
    BLUE: "acnml",
    GREEN: "last-layer",
    MUSTARD: "temperature",
}
COLOURS = {**METHOD_COLOURS, **THEME}
RESAMPLES, INTERVAL = 1000, (0.025, 0.975)
DODGE = 0.06  # between the lines of two methods, where they have intervals
BOXES = 0.8  # the share of a place's width that its boxes take


class Axis(NamedTuple):
    """What scores are drawn against.

    Attributes:
        places: position -> the shifts there.
        label: of the axis.
        form: of its numbers.
        ticks: positions with a number; None takes all.
    """

    places: Mapping[float, Sequence[str]]
    label: str = ""
    form: str = "{x:.0f}"
    ticks: tuple[float, ...] | None = None

    def dress(self, axes: Axes) -> None:
        """Set ticks and label."""
        axes.set_ylim(bottom=0)
        axes.set_xticks(list(self.places if self.ticks is None else self.ticks))
        axes.xaxis.set_major_formatter(self.form)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(self.label)


def lines(
    results: Results, methods: Mapping[Method, int], score: str, title: str, axis: Axis
) -> Figure:
    """Draw a score against shifts, a line per method.

    Where a place has several shifts, the line is the median over them with its 95 % bootstrap
    interval. Where it has one, the line is the mean over seeds with a band of ± one standard
    deviation.

    Args:
        results: all numbers.
        methods: with the number of inputs on which each is scored.
        score: its name.
        title: of the figure.
        axis: what is drawn against.
    """
    figure, axes = panel(title, (5.0, 4.0))
    several = any(len(shifts) > 1 for shifts in axis.places.values())
    for place, (method, n) in enumerate(methods.items()):
        look = results.study.look(method)
        if several:
            offset = DODGE * (place - (len(methods) - 1) / 2)  # intervals side by side
            points = {x: results.each(method, score, s, n) for x, s in axis.places.items()}
            _draw_medians(axes, look, {x: v for x, v in points.items() if v}, offset)
        else:
            points = {x: results.values(method, score, s[0], n) for x, s in axis.places.items()}
            _draw_band(axes, look, {x: v for x, v in points.items() if v})
    axis.dress(axes)
    legend_below(figure, columns=3 if len(methods) > 6 or not several else 2)
    return figure


def _draw_band(axes: Axes, look: Look, points: Mapping[float, list[float]]) -> None:
    if not points:
        return
    means, stds = zip(*(mean_std(values) for values in points.values()), strict=True)
    places = list(points)
    axes.plot(places, means, look.marker, linestyle="-", color=look.colour, label=look.label)
    low, high = ([m + s * std for m, std in zip(means, stds, strict=True)] for s in (-1, 1))
    axes.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0)


def _draw_medians(
    axes: Axes, look: Look, points: Mapping[float, list[float]], offset: float
) -> None:
    if not points:
        return
    middle, low, high = zip(*(bootstrap_median(v) for v in points.values()), strict=True)
    places = [place + offset for place in points]
    axes.plot(places, middle, look.marker, linestyle="-", color=look.colour, label=look.label)
    axes.vlines(places, low, high, color=look.colour, linewidth=1, alpha=0.6)


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, by drawing the values with replacement."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    medians = torch.tensor(values, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return median(values), low, high


def boxes(
    scores: Mapping[Method, Mapping[float, list[float]]],
    look: Callable[[Method], Look],
    title: str,
    axis: Axis,
) -> Figure:
    """Draw scores at every place as boxes, side by side; methods without scores are left out.

    A circle is the mean, and the boxes of ACNML are striped.
    """
    figure, axes = panel(title, (9.4, 3.6))
    there = {method: found for method, found in scores.items() if found}
    for place, (method, found) in enumerate(there.items()):
        offset = BOXES * ((place + 0.5) / len(there) - 0.5)
        width = 0.8 * BOXES / len(there)
        _draw_boxes(axes, look(method), found, offset, width, striped=method.rule == ACNML)
    axis.dress(axes)
    axes.grid(axis="x", visible=False)
    legend_below(figure, columns=6)
    return figure


def _draw_boxes(
    axes: Axes,
    look: Look,
    scores: Mapping[float, list[float]],
    offset: float,
    width: float,
    striped: bool,
) -> None:
    mean = {"marker": "o", "markersize": 3.2, "markeredgecolor": INK, "markerfacecolor": "white"}
    drawn = axes.boxplot(
        list(scores.values()),
        positions=[place + offset for place in scores],
        widths=width,
        patch_artist=True,
        manage_ticks=False,
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": look.colour},
        medianprops={"color": INK, "linewidth": 1.2},
        showmeans=True,
        meanprops=mean,
    )
    for part in (*drawn["boxes"], *drawn["whiskers"], *drawn["caps"]):
        part.set(color=look.colour, linewidth=0.9)
    for box in drawn["boxes"]:
        box.set(facecolor="none" if striped else look.colour, alpha=1 if striped else 0.55)
        box.set_hatch("//////" if striped else "")
    drawn["boxes"][0].set_label(look.label)


def reliability(results: Results, methods: Iterable[Method], shift: str, title: str) -> Figure:
    """Draw accuracy against confidence at a shift, a line per method that has a diagram there."""
    figure, axes = panel(title, (4.0, 4.4))
    frame_of_reliability(axes)
    for method in methods:
        look = results.study.look(method)
        if diagram := results.diagrams.get((method.name, shift)):
            axes.plot(*diagram, look.marker, linestyle="-", color=look.colour, label=look.label)
    legend_below(figure, columns=2)
    return figure


def frontier(
    results: Results,
    families: Sequence[Method],
    shifts: Sequence[str],
    title: str,
    span: float,
    size: tuple[float, float] = (5.0, 4.3),
) -> Figure:
    """Draw the mean ECE at some shifts against held-out NLL, a path per family.

    The first family is a temperature, whose value 1 changes nothing: a dashed line marks its NLL.

    Args:
        results: all numbers.
        families: whose knobs were swept.
        shifts: whose ECE is averaged.
        title: of the figure.
        span: how many times the plain network's NLL is shown; paths end there.
        size: in inches.
    """
    figure, axes = panel(title, size)
    plain = [p.held_out_nll for p in results.path(families[0]) if p.method.value == 1]
    most = span * plain[0] if plain else math.inf
    for family in families:
        points = [p for p in results.path(family) if p.held_out_nll <= most]
        if points:
            eces = [sum(p.ece[shift] for shift in shifts) / len(shifts) for p in points]
            look = results.study.look(family)
            style: dict[str, Any] = {"linestyle": "-", "color": look.colour, "label": look.label}
            axes.plot([p.held_out_nll for p in points], eces, look.marker, **style)
    if plain:
        axes.axvline(plain[0], color=FAINT, linestyle=DASHES, linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.2g}")
    axes.xaxis.set_minor_formatter("{x:.2g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="NLL of held-out inputs", ylabel="ECE")
    legend_below(figure, columns=3 if size[0] < 6 else 4)
    return figure


def legend_below(figure: Figure, columns: int = 3) -> None:
    """Put the legend of the first axes below the figure, where there is something to name."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        style: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": INK}
        figure.legend(loc="outside lower center", ncols=columns, **style)


# Files -----------------------------------------------------------------------------------------


def write_figures(drawn: Mapping[str, Figure], folder: Path) -> dict[str, str]:
    """Write all figures as SVG and PNG, and return the SVG documents."""
    documents = {name: to_svg(figure) for name, figure in drawn.items()}
    for name, figure in drawn.items():
        write_file(folder / f"{name}.svg", documents[name].encode())
        write_file(folder / f"{name}.png", picture(figure))
    return documents


def picture(figure: Figure) -> bytes:
    """Return a figure as a PNG image on white: a picture has no page around it."""
    figure.set_facecolor("white")
    return to_png(figure)


def svg(name: str, document: str) -> str:
    """Put a figure inline, in the page's colours."""
    return inline_svg(document, name, name.replace("-", " "), COLOURS)
