"""The theory study's figures: errors and bounds against the number of training points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from acnml.plots import BLUE, DASHES, INK, ORANGE, PINK
from studies.drawing import halo, panel, spread
from studies.theory.study import ACNML, INFLUENCE, MAP, Findings
from studies.theory.summary import power

COLOURS = {MAP: ORANGE, INFLUENCE: PINK, ACNML: BLUE}
MARKERS = {MAP: "o", INFLUENCE: "s", ACNML: "^"}
THEOREM = "Theorem 3.1"
DASHED: dict[str, Any] = {"linestyle": DASHES, "linewidth": 1.4}


def parameters(findings: Findings, title: str) -> Figure:
    """Draw the errors of the parameters and the three bounds."""
    measured = findings.measured
    lines = _errors([m.parameter_errors for m in measured], findings.parameter_slope)
    lines += [
        Line(THEOREM, INK, "", [m.theorem_bound.largest for m in measured]),
        Line("", COLOURS[INFLUENCE], "", [m.influence_bound.largest for m in measured]),
        Line("sharper bounds", COLOURS[ACNML], "", [m.acnml_bound.largest for m in measured]),
    ]
    return _figure(findings, lines, title, "distance to the exact refit")


def log_probs(findings: Findings, title: str) -> Figure:
    """Draw the errors of the log-probabilities, and Proposition 3.2's bounds."""
    measured = findings.measured
    lines = _errors([m.log_prob_errors for m in measured], findings.log_prob_slope)
    lines += [
        Line("Proposition 3.2", INK, "", [m.proposition_bound.largest for m in measured]),
        Line("sharper bound", COLOURS[ACNML], "", [m.log_prob_bound.largest for m in measured]),
    ]
    return _figure(findings, lines, title, "difference to log p of CNMAP")


class Line(NamedTuple):
    """A line of a figure, named where it ends; dashed, for a bound, if it has no marker."""

    name: str
    colour: str
    marker: str
    values: list[float]  # a bound is infinite where it is not proven

    def draw(self, axes: Axes, sizes: Sequence[int]) -> None:
        """Draw what is finite."""
        points = [p for p in zip(sizes, self.values, strict=True) if math.isfinite(p[1])]
        style = {"marker": self.marker} if self.marker else DASHED
        if points:
            axes.plot(*zip(*points, strict=True), color=self.colour, **style)


def _errors(errors: list[Mapping[str, float]], slope: Callable[[str], float]) -> list[Line]:
    return [
        Line(
            f"{method}, {power(slope(method))}",
            colour,
            MARKERS[method],
            [e[method] for e in errors],
        )
        for method, colour in COLOURS.items()
    ]


def _figure(findings: Findings, lines: list[Line], title: str, label: str) -> Figure:
    figure, axes = panel(title, (7.2, 4.6))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for line in lines:
        line.draw(axes, findings.study.sizes)
    axes.set(xlabel="training points n", ylabel=label)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.set_ylim(bottom=axes.get_ylim()[0] / 3)  # room for the names of the lowest lines
    _name_ends(axes, findings.study.sizes[-1], lines)
    return figure


def _name_ends(axes: Axes, x: float, lines: list[Line]) -> None:
    """Write names right of where lines end, moved apart where they would overlap."""
    named = {line.name: line for line in lines if line.name and math.isfinite(line.values[-1])}
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    ends = {name: math.log10(line.values[-1]) for name, line in named.items()}
    for name, y in spread(ends, gap=0.06 * (high - low)).items():
        axes.annotate(name, (x, 10**y), (9, 0), va="center", **halo(named[name].colour))
