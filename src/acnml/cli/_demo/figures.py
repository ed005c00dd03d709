"""The demo's figures: functions of plain data, in one style and one colour-blind-safe palette.

Every figure is drawn through matplotlib's object-oriented interface; no pyplot, no global state.
Lines are labelled where they end, and every method also has a marker of its own, so that nothing
rests on colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave

from acnml.cli._demo.measurement import Bin, Example, View
from acnml.cli._demo.study import ACNML, BMA, LAST_LAYER, MAP, Findings
from acnml.cli._shared.drawing import FAINT, INK, PAPER, STYLE, halo, label_ends, panel

# Okabe and Ito's palette, whose colours stay apart for every common kind of colour vision.
COLOURS = {MAP: "#d55e00", BMA: "#cc79a7", ACNML: "#0072b2", LAST_LAYER: "#009e73"}
MARKERS = {MAP: "o", BMA: "s", ACNML: "^", LAST_LAYER: "D"}


# Whole figures ---------------------------------------------------------------------------------


def score_against_angle(findings: Findings, score: str, title: str) -> Figure:
    """Draw one score of every method against the rotation."""
    figure, axes = panel(title)
    draw_curves(axes, findings.study.angles, _curves(findings, score))
    return figure


def confidence_against_angle(findings: Findings, title: str) -> Figure:
    """Draw every method's mean confidence, and the accuracy it should equal."""
    figure, axes = panel(title)
    draw_confidence(axes, findings)
    return figure


def reliability(method: str, diagrams: Mapping[int, Sequence[Bin]], angle: int) -> Figure:
    """Draw accuracy against confidence for one method, upright and turned."""
    figure, axes = panel(method, (3.1, 3.0))
    draw_reliability(axes, method, diagrams, angle)
    return figure


def trade_off(findings: Findings, title: str) -> Figure:
    """Draw what every prior precision costs upright and what it buys on turned digits."""
    figure, axes = panel(title, (7.2, 3.9))
    draw_trade_off(axes, findings)
    return figure


def overview(findings: Findings) -> Figure:
    """Draw the demo in one picture, with a digit turning below both panels."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 4.5), facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
        left, right = figure.subplots(1, 2)
        left.set_title("Confidence, and how often it is right")
        right.set_title("Calibration error (ECE), lower is better")
        draw_confidence(left, findings)
        draw_curves(right, findings.study.angles, _curves(findings, "ece"))
        for axes in (left, right):
            draw_strip(axes, _clearest(findings.examples).views)
    return figure


# Parts of figures ------------------------------------------------------------------------------


def draw_curves(
    axes: Axes, angles: Sequence[int], curves: Mapping[str, Sequence[float]], top: float = 0
) -> None:
    """Draw a line per method, from 0 to at least `top`, with its name where it ends."""
    for method, values in curves.items():
        axes.plot(angles, values, MARKERS[method], linestyle="-", color=COLOURS[method])
    highest = max(max(values) for values in curves.values())
    axes.set_ylim(0, max(top, 1.08 * highest))
    axes.set_xticks(angles[::2] if len(angles) > 7 else angles)
    axes.xaxis.set_major_formatter("{x:.0f}°")
    label_ends(axes, angles[-1], {m: values[-1] for m, values in curves.items()}, COLOURS)


def draw_confidence(axes: Axes, findings: Findings) -> None:
    """Draw confidence per method, and the network's accuracy as the line to follow."""
    angles, accuracy = findings.study.angles, _curves(findings, "accuracy")[MAP]
    draw_curves(axes, angles, _curves(findings, "confidence"), top=1)
    axes.plot(angles, accuracy, color=INK, linestyle=(0, (4, 2)), linewidth=1.5)
    low = min(range(len(angles)), key=lambda i: accuracy[i])
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": INK}
    axes.annotate("how often it is right", (angles[low], accuracy[low]), (0, -12), **place)
    axes.yaxis.set_major_formatter(_percent)


def draw_reliability(
    axes: Axes, method: str, diagrams: Mapping[int, Sequence[Bin]], angle: int
) -> None:
    """Draw the diagonal of perfect calibration, and the bins of upright and of turned digits."""
    axes.plot([0, 1], [0, 1], color=FAINT, linestyle=(0, (4, 2)), linewidth=1)
    upright, turned = ([*zip(*diagrams[a], strict=True)] for a in (0, angle))
    axes.plot(*upright, "o-", color=FAINT, markerfacecolor=PAPER, linewidth=1.2)
    axes.plot(*turned, MARKERS[method], linestyle="-", color=COLOURS[method])
    axes.set(xlim=(0, 1.03), ylim=(0, 1.03), xlabel="confidence", ylabel="accuracy")
    axes.set_aspect("equal")
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([0.5, 1])  # one zero at the corner is enough
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_percent)
    axes.text(0.04, 0.93, "upright", color=FAINT)
    axes.text(0.04, 0.83, f"turned {angle}°", color=COLOURS[method])


def draw_trade_off(axes: Axes, findings: Findings) -> None:
    """Draw a path per method, from MAP at the left to ever wider posteriors at the right."""
    study, start = findings.study, findings.map_trial
    for method, trials in findings.trials.items():
        path = sorted([start, *trials, findings.chosen[method]], reverse=True)
        price = [trial.validation_nll - start.validation_nll for trial in path]
        benefit = [trial.turned_ece for trial in path]
        axes.plot(price, benefit, MARKERS[method], linestyle="-", color=COLOURS[method])
        _mark_choice(axes, method, price[path.index(findings.chosen[method])], findings)
    axes.plot(0, start.turned_ece, MARKERS[MAP], color=COLOURS[MAP], markersize=8)
    axes.annotate(MAP, (0, start.turned_ece), (9, 3), **halo(COLOURS[MAP]))
    axes.axvline(study.tolerance, color=FAINT, linestyle=(0, (4, 2)), linewidth=1)
    place: dict[str, Any] = {"textcoords": "offset points", "color": INK}
    axes.annotate("allowed price", (study.tolerance, 0), (5, 6), **place)
    axes.set(xlim=(-0.15 * study.tolerance, 5 * study.tolerance), ylim=(0, 1.12 * start.turned_ece))
    axes.set_xlabel("price: extra NLL on upright validation digits, nats")
    axes.set_ylabel(f"ECE of digits turned {study.focus_angle}°")


def draw_strip(axes: Axes, views: Sequence[View]) -> None:
    """Draw the turning digit below the ticks of an angle axis."""
    shown = {int(tick) for tick in axes.get_xticks()}
    left, right = axes.get_xlim()
    for view in views:
        if view.angle in shown:
            centre = (view.angle - left) / (right - left)
            inset = axes.inset_axes((centre - 0.06, -0.28, 0.12, 0.18))
            # Smooth, because one cannot see a digit in 8×8 squares.
            inset.imshow(view.pixels, "gray", vmin=0, vmax=1, interpolation="bicubic")
            inset.set_axis_off()


# From pixels to bytes --------------------------------------------------------------------------


def pixels_png(pixels: Sequence[Sequence[float]]) -> bytes:
    """Return grey levels in [0, 1] as a PNG image of as many pixels."""
    buffer = io.BytesIO()
    imsave(buffer, np.asarray(pixels), cmap="gray", vmin=0, vmax=1, format="png")
    return buffer.getvalue()


# What they share -------------------------------------------------------------------------------


def _curves(findings: Findings, score: str) -> dict[str, list[float]]:
    """One score by method, in the order of the angles."""
    angles = findings.study.angles
    return {m: [getattr(by[a], score) for a in angles] for m, by in findings.scores.items()}


def _clearest(examples: Sequence[Example]) -> Example:
    """The example that the network is surest of while it stands upright."""
    return max(examples, key=lambda example: example.views[0].predictions[MAP][1])


def _mark_choice(axes: Axes, method: str, price: float, findings: Findings) -> None:
    """Ring the chosen prior precision and write the method's name beside it."""
    ece = findings.chosen[method].turned_ece
    ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": INK, "markersize": 11}
    axes.plot(price, ece, "o", **ring)
    axes.annotate(method, (price, ece), (9, 5), **halo(COLOURS[method]))


def _percent(value: float, _position: float) -> str:
    return f"{value:.0%}"
