"""The study's figures: functions of `Results`, drawn without pyplot in the style of all pages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from acnml.cli._shared.drawing import INK, panel
from studies.cifar10_c.choices import SweepPoint
from studies.cifar10_c.looks import LOOKS
from studies.cifar10_c.methods import SWEPT, TEMPERED, Method
from studies.cifar10_c.results import Results, blurred_shifts
from studies.cifar10_c.study import CLEAN
from studies.study.figures import Look, draw_trade_off, legend_below, reliability_panel

RESAMPLES, INTERVAL = 1000, (0.025, 0.975)
DODGE = 0.06  # between the lines of two methods
BOXES = 0.8  # the share of a severity's width that its boxes take


def boxes(results: Results, methods: Sequence[Method], score: str, title: str, n: int) -> Figure:
    """Draw a score over all corruptions as boxes, side by side at every severity."""
    figure, axes = panel(title, (9.4, 3.6))
    there = [m for m in methods if any(_scores(results, m, score, n).values())]
    for place, method in enumerate(there):
        offset = BOXES * ((place + 0.5) / len(there) - 0.5)
        scores = _scores(results, method, score, n)
        _draw_boxes(axes, LOOKS[method], scores, offset, 0.8 * BOXES / len(there))
    _severities(axes, sorted(results.study.severities))
    axes.grid(axis="x", visible=False)
    legend_below(figure, columns=6)
    return figure


def lines(results: Results, methods: Sequence[Method], score: str, title: str, n: int) -> Figure:
    """Draw the median over corruptions against severity, with its 95 % bootstrap interval."""
    figure, axes = panel(title, (5.0, 4.0))
    for place, method in enumerate(methods):
        scores = {0: results.at_severity(method, score, 0, n), **_scores(results, method, score, n)}
        points = {s: values for s, values in sorted(scores.items()) if values}
        if points:
            offset = DODGE * (place - (len(methods) - 1) / 2)  # intervals beside each other
            _draw_medians(axes, LOOKS[method], points, offset)
    _severities(axes, [0, *sorted(results.study.severities)])
    legend_below(figure, columns=2 if len(methods) < 7 else 3)
    return figure


def reliability(results: Results, method: Method) -> Figure:
    """Draw accuracy against confidence for clean images and for two severities of blur."""
    look = LOOKS[method]
    figure, axes = reliability_panel(look.label)
    shifts = blurred_shifts(results.study)
    for place, shift in enumerate(shifts):
        diagram = results.diagrams.get((method.name, shift))
        strength = (place + 1) / len(shifts)
        if diagram:
            axes.plot(*diagram, "o-", color=look.colour, alpha=strength, markersize=3)
        name = "clean" if shift == CLEAN else f"blur {shift.split()[-1]}"
        axes.text(0.04, 0.93 - 0.09 * place, name, color=look.colour, alpha=strength)
    return figure


def frontier(results: Results) -> Figure:
    """Draw the mean ECE over corruptions against the NLL of held-out images, a path per family."""
    severity = results.study.frontier.severity
    figure, axes = panel(f"Mean ECE at severity {severity}", (8.0, 5.4))
    sweeps = {LOOKS[family]: path_of(results, family) for family in SWEPT}
    paths = {look: [(p.held_out_nll, p.ece) for p in sweep] for look, sweep in sweeps.items()}
    plain = [p.held_out_nll for p in path_of(results, TEMPERED) if p.method.value == 1]
    there = {look: path for look, path in paths.items() if path}
    draw_trade_off(axes, there, plain[0] if plain else None, span=2.5)
    axes.set_xlabel("NLL of held-out images")
    legend_below(figure, columns=4)
    return figure


def path_of(results: Results, family: Method) -> list[SweepPoint]:
    """Return the sweep of a family, the most cautious value first."""
    return [point for point in results.sweep if point.family == family.family]


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, by drawing the values with replacement."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    medians = torch.tensor(values, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return median(values), low, high


def _scores(results: Results, method: Method, score: str, n: int) -> dict[int, list[float]]:
    """Return a score of every corruption, by severity."""
    return {s: results.at_severity(method, score, s, n) for s in sorted(results.study.severities)}


def _draw_boxes(
    axes: Axes, look: Look, scores: dict[int, list[float]], offset: float, width: float
) -> None:
    there = {severity: values for severity, values in scores.items() if values}
    drawn = axes.boxplot(
        list(there.values()),
        positions=[severity + offset for severity in there],
        widths=width,
        patch_artist=True,
        manage_ticks=False,
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": look.colour},
        medianprops={"color": INK, "linewidth": 1.2},
    )
    for part in (*drawn["boxes"], *drawn["whiskers"], *drawn["caps"]):
        part.set(color=look.colour, linewidth=0.9)
    for box in drawn["boxes"]:
        box.set(facecolor=look.colour, alpha=0.55)
    drawn["boxes"][0].set_label(look.label)


def _draw_medians(axes: Axes, look: Look, points: dict[int, list[float]], offset: float) -> None:
    middle, low, high = zip(*(bootstrap_median(v) for v in points.values()), strict=True)
    places = [severity + offset for severity in points]
    axes.plot(places, middle, look.marker, linestyle="-", color=look.colour, label=look.label)
    axes.vlines(places, low, high, color=look.colour, linewidth=1, alpha=0.6)


def _severities(axes: Axes, severities: Sequence[int]) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xticks(severities)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("severity")
