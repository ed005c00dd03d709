"""The study's figures: functions of `Results`, drawn without pyplot in the style of all pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from acnml.cli._shared.drawing import FAINT, STYLE, panel
from studies.rotated_mnist.looks import LOOKS
from studies.rotated_mnist.methods import Method
from studies.rotated_mnist.naive import Comparison
from studies.rotated_mnist.results import Results
from studies.rotated_mnist.study import RANDOM
from studies.study.figures import (
    BLUE,
    DASHES,
    ORANGE,
    Look,
    draw_trade_off,
    legend_below,
    reliability_panel,
)
from studies.study.tables import mean_std


def against_angle(
    results: Results, methods: Mapping[Method, int], score: str, title: str
) -> Figure:
    """Draw a score against rotation: means over seeds, with a band of ± one standard deviation.

    Args:
        results: all numbers.
        methods: with the number of images on which each is scored.
        score: its name.
        title: what to call it.
    """
    figure, axes = panel(title, (5.0, 4.0))
    for method, n in methods.items():
        points = [
            (angle, *mean_std(values))
            for angle in sorted(results.study.angles)
            if (values := results.values(method, score, f"{angle}°", n))
        ]
        if points:
            _draw_band(axes, LOOKS[method], points)
    axes.set_ylim(bottom=0)
    axes.set_xticks([angle for angle in results.study.angles if angle % 30 == 0])
    axes.xaxis.set_major_formatter("{x:.0f}°")
    legend_below(figure)
    return figure


def _draw_band(axes: Axes, look: Look, points: Sequence[tuple[float, float, float]]) -> None:
    angles, means, stds = zip(*points, strict=True)
    axes.plot(angles, means, look.marker, linestyle="-", color=look.colour, label=look.label)
    low, high = ([m + s * std for m, std in zip(means, stds, strict=True)] for s in (-1, 1))
    axes.fill_between(angles, low, high, color=look.colour, alpha=0.15, linewidth=0)


def reliability(results: Results, method: Method, title: str) -> Figure:
    """Draw accuracy against confidence for upright and for randomly turned images."""
    figure, axes = reliability_panel(title)
    look = LOOKS[method]
    for shift, marker, colour in (("0°", "o", FAINT), (RANDOM, look.marker, look.colour)):
        diagram = results.diagrams.get((method.name, shift))
        if diagram:
            axes.plot(*diagram, marker, linestyle="-", color=colour, markersize=3.5)
    axes.text(0.04, 0.93, "upright", color=FAINT)
    axes.text(0.04, 0.83, "turned at random", color=look.colour)
    return figure


def frontier(results: Results, families: Sequence[Method], shift: str, title: str) -> Figure:
    """Draw ECE under a shift against the NLL of upright validation images, a path per family.

    The first family is a temperature, whose 1 changes nothing: a line marks its NLL.
    """
    figure, axes = panel(title, (5.0, 4.3))
    paths = {f: [p for p in results.sweep if p.family.family == f.family] for f in families}
    points = {LOOKS[f]: [(p.validation_nll, p.ece[shift]) for p in paths[f]] for f in families}
    plain = [p.validation_nll for p in paths[families[0]] if math.isclose(p.value, 1)]
    draw_trade_off(axes, points, plain[0] if plain else None, span=3.5)
    axes.set_xlabel("NLL of upright validation images")
    legend_below(figure)
    return figure


def scatter(comparisons: Sequence[Comparison]) -> Figure:
    """Draw ACNML against naive CNML: normaliser, NLL of the true label, and confidence."""
    with mpl.rc_context(STYLE):
        rows = len(comparisons)
        figure = Figure(figsize=(9.4, 3.1 * rows), layout="constrained")
        grid = figure.subplots(rows, 3, squeeze=False)
        for line, comparison in zip(grid, comparisons, strict=True):
            where = "upright" if comparison.shift == "0°" else f"shift: {comparison.shift}"
            for axes, (name, quantity) in zip(line, QUANTITIES.items(), strict=True):
                axes.set_title(f"{name}, {where}")
                _draw_pairs(axes, comparison, quantity)
        grid[0][0].legend(fontsize=7.5, frameon=False)
    return figure


def _normaliser(log_lik: Tensor, _: Tensor) -> Tensor:
    return log_lik.double().exp().sum(1)


def _nll(log_lik: Tensor, labels: Tensor) -> Tensor:
    return -torch.log_softmax(log_lik.double(), 1).gather(1, labels[:, None])[:, 0]


def _confidence(log_lik: Tensor, _: Tensor) -> Tensor:
    return torch.softmax(log_lik.double(), 1).amax(1)


Quantity: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # log-likelihoods, labels -> (N,)
QUANTITIES: Mapping[str, Quantity] = {
    "Normaliser C(x)": _normaliser,
    "NLL": _nll,
    "Confidence": _confidence,
}


def _draw_pairs(axes: Axes, comparison: Comparison, quantity: Quantity) -> None:
    ours = quantity(comparison.acnml, comparison.labels)
    others = {
        "naive CNML": (quantity(comparison.naive, comparison.labels), BLUE, "o"),
        "its maximum": (quantity(comparison.naive_max, comparison.labels), ORANGE, "x"),
    }
    for name, (theirs, colour, marker) in others.items():
        axes.scatter(theirs, ours, 18, color=colour, marker=marker, label=name, alpha=0.8)
    every = torch.cat([ours, *(theirs for theirs, _, _ in others.values())])
    ends = [every.min().item(), every.max().item()]
    axes.plot(ends, ends, color=FAINT, linestyle=DASHES, linewidth=1)
    axes.set(xlabel="naive CNML", ylabel="ACNML")
