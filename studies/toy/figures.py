"""The toy study's figures: maps of probability, and confidence against distance.

On a map orange and blue are the two classes, and white is where neither is preferred. Points of
the classes also differ in shape, so that nothing rests on colour alone.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from acnml.plots import BLUE, DASHES, FAINT, GREEN, INK, ORANGE, PINK, STYLE
from studies.drawing import halo, label_ends, panel
from studies.toy.study import ACNML, BMA, CNMAP, CNML, MAP, Findings, QueryFit, Sample

# What lies on a map keeps its colours in a dark page, as the map does: none of these is the page's.
CLASS_COLOURS = ("#d45d00", "#0071b1")
LINE, EDGE = "#23272c", "#fdfdfd"
CLASS_MARKERS = ("o", "^")
# Lighter than the points that lie on them.
CLASSES = LinearSegmentedColormap.from_list("classes", ["#ea9a5b", "#ffffff", "#5fa8d6"])
NORMALISER = LinearSegmentedColormap.from_list("normaliser", ["#ffffff", "#45b795"])
METHOD_COLOURS = {CNML: INK, CNMAP: GREEN, ACNML: BLUE, BMA: PINK, MAP: ORANGE}
METHOD_MARKERS = {CNML: "v", CNMAP: "D", ACNML: "^", BMA: "s", MAP: "o"}
MAP_SIZE = (2.7, 2.95)  # inches, a square and its title


# Whole figures ---------------------------------------------------------------------------------


def probability_map(findings: Findings, probability: Tensor, title: str) -> Figure:
    """Draw the probability of class 1 as colours, with levels and the training points on it."""
    figure = cnml_map(findings, probability, findings.sample, title)
    draw_levels(figure.axes[0], findings, probability)
    return figure


def cnml_map(findings: Findings, probability: Tensor, sample: Sample, title: str) -> Figure:
    """Draw the same of any sample without levels: large parts of CNML are exactly one half."""
    figure, axes = panel(title, MAP_SIZE)
    draw_map(axes, findings, probability, CLASSES, (0, 1))
    draw_points(axes, sample)
    return figure


def normaliser_map(findings: Findings, title: str) -> Figure:
    """Draw CNML's C(x), from 1 where one label only can be explained to 2 where both can."""
    figure, axes = panel(title, MAP_SIZE)
    draw_map(axes, findings, findings.exact[0.0].normaliser, NORMALISER, (1, 2))
    draw_points(axes, findings.sample)
    return figure


def query_map(findings: Findings, fit: QueryFit, label: int | None, title: str) -> Figure:
    """Draw one model of the query figure, and what it gives the query."""
    figure = probability_map(findings, fit.probability, title)
    axes = figure.axes[0]
    x, y = findings.study.query
    marker = "*" if label is None else CLASS_MARKERS[label]
    face = EDGE if label is None else CLASS_COLOURS[label]
    star: dict[str, Any] = {
        "markerfacecolor": face,
        "markeredgecolor": LINE,
        "markeredgewidth": 1.3,
    }
    axes.plot(x, y, marker, markersize=13 if label is None else 10, **star)
    return figure


def colour_bar(colours: LinearSegmentedColormap, ends: tuple[str, str, str]) -> Figure:
    """Draw what the colours of a map mean, from its least value to its largest."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 0.45), layout="constrained")
        axes = figure.subplots()
        axes.imshow([[i / 100 for i in range(101)]], colours, aspect="auto", extent=(0, 1, 0, 1))
        axes.set_xticks([0.0, 0.5, 1.0], list(ends))
        axes.set_yticks([])
        axes.grid(visible=False)
        first, _, last = axes.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
    return figure


def fading(findings: Findings, title: str) -> Figure:
    """Draw every method's confidence against the distance from the data."""
    figure, axes = panel(title, (7.2, 3.9))
    distances = findings.study.distances
    for method, confidences in findings.rings.items():
        marker, colour = METHOD_MARKERS[method], METHOD_COLOURS[method]
        axes.plot(distances, confidences, marker, linestyle="-", color=colour)
    axes.axhline(0.5, color=FAINT, linestyle=DASHES, linewidth=1)
    axes.annotate("no preference", (distances[0], 0.5), (0, -12), **halo(INK))
    axes.set_xscale("log")
    axes.set(ylim=(0.42, 1.03), xlabel="distance from the middle of the data")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    ends = {method: values[-1] for method, values in findings.rings.items()}
    label_ends(axes, distances[-1], ends, METHOD_COLOURS)
    return figure


# Parts of figures ------------------------------------------------------------------------------


def draw_map(
    axes: Axes,
    findings: Findings,
    values: Tensor,
    colours: LinearSegmentedColormap,
    limits: tuple[float, float],
) -> None:
    """Draw values as colours, without ticks: the plane has no units."""
    e = findings.study.extent
    axes.imshow(
        values.numpy(),
        colours,
        origin="lower",
        extent=(-e, e, -e, e),
        vmin=limits[0],
        vmax=limits[1],
        interpolation="bilinear",
        interpolation_stage="data",
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def draw_levels(axes: Axes, findings: Findings, probability: Tensor) -> None:
    """Draw where a class becomes likelier than the other, and where it has 90%."""
    e = findings.study.extent
    box: dict[str, Any] = {"extent": (-e, e, -e, e), "colors": LINE}
    values = probability.numpy()
    axes.contour(values, [0.5], linewidths=1.1, **box)
    axes.contour(values, [0.1, 0.9], linewidths=0.7, linestyles="dashed", **box)


def draw_points(axes: Axes, sample: Sample) -> None:
    """Draw the training points, a shape and a colour per class."""
    for label, (marker, colour) in enumerate(zip(CLASS_MARKERS, CLASS_COLOURS, strict=True)):
        points = sample.points[sample.labels == label].numpy()
        edge: dict[str, Any] = {"markeredgecolor": EDGE, "markeredgewidth": 0.7}
        axes.plot(*points.T, marker, color=colour, markersize=4.5, **edge)
