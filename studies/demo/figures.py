"""The demo's figures: functions of plain data, in one style and one colour-blind-safe palette.

Every figure is drawn through matplotlib's object-oriented interface; no pyplot, no global state.
Lines are labelled at their ends, and every method has its own marker, so that the figures can be
read without colour.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import PercentFormatter

from acnml.plots import (
    BLUE,
    DASHES,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PINK,
    STYLE,
    frame_of_reliability,
)
from studies.demo.examples import Example, View
from studies.demo.study import ACNML, BEST, BMA, EQUAL, METHODS, NETWORK, PRICE, Findings, Summary
from studies.drawing import label_ends, panel
from studies.engine.figures import MUSTARD
from studies.engine.results import Diagram

COLOURS = {NETWORK: ORANGE, BEST: MUSTARD, EQUAL: GREEN, BMA: PINK, ACNML: BLUE}
MARKERS = {NETWORK: "o", BEST: "v", EQUAL: "D", BMA: "s", ACNML: "^"}


# Whole figures ---------------------------------------------------------------------------------


def score_against_angle(findings: Findings, score: str, title: str) -> Figure:
    """Draw one score of every method against the rotation."""
    figure, axes = panel(title)
    draw_curves(axes, findings, score)
    return figure


def confidence_against_angle(findings: Findings, title: str) -> Figure:
    """Draw every method's mean confidence, and the accuracy that it should equal."""
    figure, axes = panel(title)
    draw_curves(axes, findings, "confidence", top=1)
    angles, accuracy = findings.study.angles, findings.curve(NETWORK, "accuracy")
    axes.plot(angles, accuracy, color=INK, linestyle=DASHES, linewidth=1.5)
    low = min(range(len(angles)), key=lambda i: accuracy[i])
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": INK}
    axes.annotate("accuracy", (angles[low], accuracy[low]), (0, -12), **place)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def reliability(method: str, diagrams: Mapping[int, Diagram], angle: int) -> Figure:
    """Draw accuracy against confidence for one method, upright and rotated."""
    figure, axes = panel(method, (3.1, 3.0))
    frame_of_reliability(axes)
    axes.plot(*diagrams[0], "o-", color=FAINT, markerfacecolor=PAPER, linewidth=1.2)
    axes.plot(*diagrams[angle], MARKERS[method], linestyle="-", color=COLOURS[method])
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([0.5, 1])  # the x-axis already has a zero at the corner
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    axes.text(0.04, 0.93, "upright", color=FAINT)
    axes.text(0.04, 0.83, f"rotated {angle}°", color=COLOURS[method])
    return figure


def overview(findings: Findings) -> Figure:
    """Draw the demo in one picture: ECE against rotation, and what every method costs and gains."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.2, 4.9), facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        grid = figure.add_gridspec(2, 2, width_ratios=(1.75, 1))
        left, above, below = (
            figure.add_subplot(grid[at]) for at in ((slice(None), 0), (0, 1), (1, 1))
        )
        left.set_title("Calibration error (ECE) as digits rotate, lower is better")
        draw_overview(findings, left, above, below)
    return figure


def narrow_overview(findings: Findings) -> Figure:
    """Draw the same picture for a phone: one part below the other, in letters that stay legible."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 7.6), facecolor="white", layout="constrained")
        # Two halves, so that the names beside the bars do not push the curves to the right.
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.05)).flat
        curves, (left, right) = above.subplots(), below.subplots(2)
        curves.set_title("ECE as digits rotate, lower is better")
        draw_overview(findings, curves, left, right, every=4)
    return figure


# Parts of figures ------------------------------------------------------------------------------


def draw_overview(findings: Findings, curves: Axes, cost: Axes, gain: Axes, every: int = 2) -> None:
    """Draw ECE against rotation with a tick at some angles, what methods cost, what they gain."""
    draw_curves(curves, findings, "ece")
    curves.set_xticks(findings.study.angles[::every])
    draw_strip(curves, _clearest(findings.examples).views)
    cost.set_title("Cost: NLL on upright digits")
    draw_bars(cost, lambda method: findings.upright(method, "nll"))
    gain.set_title(f"Gain: ECE, rotated {findings.study.shifted_from}° or more")
    draw_bars(gain, lambda method: findings.shifted(method, "ece"))
    gain.set_xlabel(
        f"+{PRICE:g}: costs {PRICE:g} nats of NLL in validation\n"
        f"Mean ± standard deviation, networks: {findings.study.networks}",
        loc="left",
        fontsize=8.5,
    )


def draw_curves(axes: Axes, findings: Findings, score: str, top: float = 0) -> None:
    """Draw a line per method, from 0 to at least `top`, with its name at its end."""
    angles = findings.study.angles
    curves = {method: findings.curve(method, score) for method in METHODS}
    for method, values in curves.items():
        axes.plot(angles, values, MARKERS[method], linestyle="-", color=COLOURS[method])
    highest = max(max(values) for values in curves.values())
    axes.set_ylim(0, max(top, 1.08 * highest))
    axes.set_xticks(angles[::2] if len(angles) > 7 else angles)
    axes.xaxis.set_major_formatter("{x:.0f}°")
    ends = {method: values[-1] for method, values in curves.items()}
    label_ends(axes, angles[-1], ends, COLOURS)


def draw_bars(axes: Axes, summary: Callable[[str], Summary]) -> None:
    """Draw a bar per method with its number, and the spread between networks as a thin line."""
    longest = max(sum(summary(method)) for method in METHODS)
    for row, method in enumerate(METHODS):
        mean, deviation = summary(method)
        axes.barh(row, mean, height=0.66, color=COLOURS[method], xerr=deviation, ecolor=INK)
        weight = "bold" if method == ACNML else "normal"
        axes.text(mean + deviation + 0.02 * longest, row, f"{mean:.3f}", va="center", weight=weight)
    axes.set_yticks(range(len(METHODS)), METHODS)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * longest)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def draw_strip(axes: Axes, views: Sequence[View]) -> None:
    """Draw the rotating digit below the ticks of an angle axis."""
    shown = {int(tick) for tick in axes.get_xticks()}
    left, right = axes.get_xlim()
    for view in views:
        if view.angle in shown:
            centre = (view.angle - left) / (right - left)
            inset = axes.inset_axes((centre - 0.06, -0.24, 0.12, 0.15))
            # Smoothed: a digit is hard to recognise in 8×8 squares.
            inset.imshow(view.pixels, "gray", vmin=0, vmax=1, interpolation="bicubic")
            inset.set_axis_off()


# From pixels to bytes --------------------------------------------------------------------------


def pixels_png(pixels: Sequence[Sequence[float]]) -> bytes:
    """Return grey levels in [0, 1] as a PNG image of as many pixels."""
    buffer = io.BytesIO()
    imsave(buffer, np.asarray(pixels), cmap="gray", vmin=0, vmax=1, format="png")
    return buffer.getvalue()


# Helpers ---------------------------------------------------------------------------------------


def _clearest(examples: Sequence[Example]) -> Example:
    """The example on which the network is most confident while it is upright."""
    return max(examples, key=lambda example: example.views[0].predictions[NETWORK][1])
