"""Plots of calibration: each draws on an `ax` and returns it. Needs the extra `plots`.

    from acnml import plots

    plots.reliability(calibrated.log_probs(x), labels, label="ACNML")
    plots.regret(calibrated.regret(x), calibrated.regret(x_shifted))

Without an `ax`, a function makes a figure of its own with pyplot, which notebooks show. To draw
several methods into one plot, pass the returned `ax` to the next call with another `label`, the
name of the method. Arguments may be tensors or NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from acnml import metrics
from acnml._util.messages import needed_by
from acnml.calibration import Calibrated, Calibrator

with needed_by("acnml.plots", "acnml[plots]"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.ticker import PercentFormatter

INK, FAINT, PAPER = "#22262b", "#8a9099", "#fefefe"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
CYCLE = (BLUE, ORANGE, GREEN, PINK, "#56b4e9", "#e69f00", "#7b5cc4")
DASHES = (0, (4, 2))

Place: TypeAlias = Literal["best", "upper left", "upper right"]  # of a legend

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures look alike everywhere
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "figure.facecolor": "none",
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.9,
    "lines.markersize": 4.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.fonttype": "path",
    "svg.hashsalt": "acnml",  # the same data give the same bytes
}


def reliability(
    log_probs: Tensor,
    labels: Tensor,
    *,
    bins: int = 20,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw accuracy against confidence in bins of equal mass, over a histogram of the confidence.

    Below the diagonal, predictions are overconfident. The legend states the ECE. `log_probs` are
    (N, K) and `labels` (N,).

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> axes = reliability(log_probs, torch.tensor([0, 0, 1]), bins=2)
    """
    diagram = metrics.reliability(log_probs, labels, bins)
    confidence, correct = metrics.confidences(log_probs, labels)
    error = metrics.ece_of_confidences(confidence, correct, bins)
    ax = _axes(ax, (4.2, 4.2))
    colour = _next_colour(ax)
    heights, edges = np.histogram(confidence.numpy(), np.linspace(0, 1, 21))
    # The histogram takes the lowest fifth of the plot; only its shape matters.
    shape = 0.2 * heights / heights.max()
    ax.stairs(shape, edges, fill=True, color=colour, alpha=0.18, zorder=1)
    name = f"ECE {error:.3f}" if label is None else f"{label}, ECE {error:.3f}"
    ax.plot(diagram.confidence, diagram.accuracy, "o-", color=colour, label=name, clip_on=False)
    frame_of_reliability(ax)
    return _finish(ax, "Reliability", "upper left")


def frame_of_reliability(ax: Axes) -> None:
    """Draw the diagonal of perfect calibration, and set limits and labels.

    >>> from matplotlib.figure import Figure
    >>> axes = Figure().add_subplot()
    >>> frame_of_reliability(axes)
    >>> axes.get_xlabel()
    'confidence'
    """
    ax.plot([0, 1], [0, 1], color=FAINT, linestyle=DASHES, linewidth=1, zorder=0)
    ax.set(xlim=(0, 1.03), ylim=(0, 1.03), xlabel="confidence", ylabel="accuracy")
    ax.set_aspect("equal")


def risk_coverage(
    log_probs: Tensor, labels: Tensor, *, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the error rate among the most confident predictions, against their share, with the AURC.

    `log_probs` are (N, K) and `labels` (N,).

    >>> log_probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]]).log()
    >>> axes = risk_coverage(log_probs, torch.tensor([0, 0, 1]))
    """
    curve = metrics.risk_coverage(log_probs, labels)
    area = curve.risk.mean().item()
    ax = _axes(ax)
    name = f"AURC {area:.4f}" if label is None else f"{label}, AURC {area:.4f}"
    ax.plot(curve.coverage, curve.risk, color=_next_colour(ax), label=name)
    ax.set(xlabel="share of inputs that are answered", ylabel="error rate", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    return _finish(ax, "Risk and coverage", "best")


def regret(
    in_regret: Tensor,
    out_regret: Tensor,
    *,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    bins: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Draw histograms of the regret in and out of distribution, with the AUROC.

    Args:
        in_regret: regrets (N,) of inputs like the training data.
        out_regret: regrets (M,) of other inputs.
        names: of the two.
        bins: of the histograms.
        ax: axes to draw on.

    >>> axes = regret(torch.rand(100), 1 + torch.rand(100))
    """
    area = metrics.auroc(in_regret, out_regret)
    ax = _axes(ax)
    both = _array(in_regret), _array(out_regret)
    top = max(*(values.max() for values in both), 1e-12)
    edges = np.linspace(0, 1.02 * top, bins + 1)
    for values, name, colour in zip(both, names, (BLUE, ORANGE), strict=True):
        shares = np.histogram(values, edges)[0] / len(values)
        ax.stairs(shares, edges, fill=True, color=colour, alpha=0.3)
        ax.stairs(shares, edges, color=colour, linewidth=1.4, label=name)
    ax.set(xlabel="regret (nats)", ylabel="share of inputs", xlim=(0, edges[-1]))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    return _finish(ax, f"Regret, AUROC {area:.3f}", "upper right")


def price_frontier(calibrated: Calibrated | Calibrator, *, ax: Axes | None = None) -> Axes:
    """Draw the confidence of every method on validation data against its NLL.

    The horizontal axis is the NLL over that of the best temperature. The price is marked.

    Args:
        calibrated: the result of `acnml.calibrate` or `acnml.fit_calibrator`.
        ax: axes to draw on.

    >>> x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> logits = 3 * x[:, :1] * torch.tensor([-1.0, 1.0])  # of a classifier that is too sure
    >>> train, validation = (x[:1000], labels[:1000]), (logits[1000:], x[1000:], labels[1000:])
    >>> axes = price_frontier(acnml.fit_calibrator(train, validation, price=0.05))
    """
    own = calibrated.calibrator if isinstance(calibrated, Calibrated) else calibrated
    ax = _axes(ax)
    best = next(row.nll for row in own.table if row.method == "temperature")
    for row in own.table:
        mark = "o" if row.alpha is None else "D"
        colour = INK if row.method == "network" else _next_colour(ax)
        ax.plot(row.nll - best, row.confidence, mark, color=colour, label=row.method)
    ax.axvline(own.price, color=FAINT, linestyle=DASHES, linewidth=1)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "va": "top", "color": FAINT}
    ax.annotate(f" price {own.price:g}", (own.price, 1), **place)
    ax.set(xlabel="NLL over the best temperature (nats)", ylabel="mean confidence")
    return _finish(ax, "Caution and its price", "best")


def class_probabilities(
    log_probs: Tensor,
    *,
    names: Sequence[str] | None = None,
    label: int | None = None,
    most: int = 10,
    ax: Axes | None = None,
) -> Axes:
    """Draw the probabilities of the classes of one input as bars, the likeliest on top.

    Args:
        log_probs: log-probabilities (K,) of the input, or (1, K).
        names: of the classes.
        label: the true class, which is marked.
        most: classes to show. The true class is shown below them if it is not one of them.
        ax: axes to draw on.

    >>> axes = class_probabilities(torch.tensor([0.7, 0.2, 0.1]).log(), names=["a", "b", "c"])
    """
    probs = np.exp(_array(log_probs)).squeeze()
    if probs.ndim != 1:
        raise ValueError(f"log_probs must be those of one input, (K,), got {probs.shape}")
    order = np.argsort(-probs, kind="stable")[:most].tolist()
    if label is not None and label not in order:
        order.append(int(label))
    titles = [str(k) if names is None else str(names[k]) for k in order]
    ax = _axes(ax, (4.4, 0.9 + 0.3 * len(order)))
    colours = [GREEN if k == label else BLUE for k in order]
    ax.barh(range(len(order)), probs[order], height=0.66, color=colours)
    for place, k in enumerate(order):
        ax.text(probs[k] + 0.012, place, f"{probs[k]:.3f}", va="center", color=INK)
    ax.set_yticks(range(len(order)), titles)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.14), xlabel="probability")
    ax.set_xticks([0, 0.5, 1])
    ax.grid(visible=False)
    return _finish(ax, "Classes" if label is None else "Classes; the true one is green")


# Helpers -----------------------------------------------------------------------------------------


def _array(values: Any) -> Any:
    """Return a tensor or an array as an array in double precision."""
    return torch.as_tensor(values).detach().cpu().double().numpy()


def _axes(ax: Axes | None, size: tuple[float, float] = (4.8, 3.4)) -> Axes:
    """Return the given axes, or those of a new figure in the style of the library."""
    if ax is not None:
        return ax
    from matplotlib import pyplot  # only here: it chooses a backend

    with mpl.rc_context({**STYLE, "figure.facecolor": "white"}):
        _, new = pyplot.subplots(figsize=size, layout="constrained")
    return new


def _next_colour(ax: Axes) -> str:
    """Return a colour for one more method on these axes."""
    drawn = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    return CYCLE[len(drawn) % len(CYCLE)]


def _finish(ax: Axes, title: str, legend: Place | None = None) -> Axes:
    """Add the title and the legend."""
    ax.set_title(title, loc="left", weight="bold", size=10.5, color=INK)
    if legend is not None:
        ax.legend(loc=legend, frameon=False, fontsize=8.5, labelcolor=INK)
    return ax
