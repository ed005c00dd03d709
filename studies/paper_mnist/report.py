"""The sections of the report about the paper's MNIST experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from acnml import metrics
from acnml.plots import BLUE, DASHES, FAINT, GREEN, ORANGE, PINK, STYLE
from studies.drawing import panel
from studies.engine.figures import GREY, SKY, Axis, legend_below, lines
from studies.engine.method import ACNML, BMA, MAP, Look, Method
from studies.engine.report import Panels, Section
from studies.engine.results import Results
from studies.engine.sections import all_methods, diagrams, timing
from studies.engine.study import bins_for
from studies.engine.tables import TITLES, Table, counted
from studies.paper_mnist.naive import NAIVE, NAIVE_MAX, Compared, Comparison
from studies.paper_mnist.settings import LINES, ONE_RATE, SUBSET, WHOLE, PaperMnist
from studies.rotated_mnist.settings import RANDOM, UPRIGHT

FAR = 45  # degrees from which digits count as rotated
SEVERE = 90  # degrees from which a rotation counts as severe
# The paper's table 1, on a GTX 1080Ti without batches: seconds of one prediction.
PAPERS_SECONDS = "0.08 s for five steps, 13.83 s for one epoch of naive CNML, 0.0001 s for MAP"
LOOKS: Mapping[str, Look] = {
    MAP: Look("MAP", ORANGE, "o"),
    BMA: Look("BMA", PINK, "s"),
    ACNML: Look("ACNML, 5 steps", BLUE, "^"),
    NAIVE: Look("naive CNML", GREY, "D"),
    NAIVE_MAX: Look("naive CNML (max)", SKY, "v"),
}


def sections(results: Results) -> list[Section]:
    """Return all sections."""
    settings: PaperMnist = results.study.settings
    shown = [s for s in (UPRIGHT, "60°", "90°", "180°", RANDOM) if s in settings.shifts]
    return [
        what_was_done(results),
        *(curves(results, part) for part in (LINES, ONE_RATE) if part in settings.parts),
        diagrams(
            results,
            results.study.methods,
            {UPRIGHT: "upright", RANDOM: "random rotation"},
            "Points are groups of equally many images with similar confidence.",
        ),
        all_methods(results, shown),
        *(naive(results, part) for part in (SUBSET, WHOLE)),
        timing(results, (), f"The paper’s Table 1 has {PAPERS_SECONDS}, on a GPU, unbatched."),
    ]


def what_was_done(results: Results) -> Section:
    """Explain data, posteriors and scale."""
    settings, data = results.study.settings, results.data
    hidden = "-".join(str(width) for width in settings.hidden)
    rate = settings.bayes_by_backprop.variance_rate
    seeds = len(settings.seeds)
    return Section(
        "What was done",
        [
            f"Networks with hidden layers {hidden}, without augmentation, and a factored Gaussian "
            f"posterior by Bayes by Backprop with prior standard deviation "
            f"{settings.bayes_by_backprop.prior_std:g}, on {len(data.train.labels):,} training "
            f"images. Every curve stands on the same {data.count(settings.images):,} test images "
            f"of {len(settings.angles)} angles; {counted(seeds, 'seed')}. ACNML is "
            "the paper’s iteration: five steps of size 0.5 with α = 1, computed exactly; "
            "linearised ACNML stands beside it.",
            f"**One setting was chosen on rotated test images:** the variances of Bayes by "
            f"Backprop learn {rate:g} times faster than its means. The part with one common rate "
            "does without this choice.",
        ],
    )


def curves(results: Results, part: str) -> Section:
    """Show the four scores over rotation: the paper's figure 4 and its expanded version."""
    settings: PaperMnist = results.study.settings
    posterior = {LINES: "BBP", ONE_RATE: "BBP, one rate"}[part]
    group = [method for method in results.study.methods if method.posterior == posterior]
    angles = sorted(settings.angles)
    places = {float(a): (f"{a}°",) for a in angles if _finished(results, group, f"{a}°")}
    ticks = tuple(float(angle) for angle in angles if angle % 30 == 0)
    axis, n = Axis(places, "rotation", "{x:.0f}°", ticks), results.inputs(group)
    counts = dict.fromkeys(group, n)
    drawn = {f"{part}-{s}": lines(results, counts, s, t, axis) for s, t in TITLES.items()}
    heading = {
        LINES: "Rotation: the paper’s comparison",
        ONE_RATE: "Rotation: one common learning rate",
    }[part]
    training = settings.one_rate if part == ONE_RATE else settings.bayes_by_backprop
    factor = training.variance_rate
    rate = (
        "one learning rate for all" if factor == 1 else f"variances learn {factor:g} times faster"
    )
    caption = (
        f"Bayes by Backprop, {training.epochs} epochs, {rate}. The first {n:,} images of every "
        "angle, the same for all curves. Bands are one standard deviation over seeds."
    )
    return Section(heading, panels=[Panels(drawn, caption)])


def _finished(results: Results, group: Sequence[Method], shift: str) -> bool:
    """Whether all methods have seen a shift: curves of one figure have the same angles."""
    return all(results.values(method, "nll", shift) for method in group)


# Naive CNML ------------------------------------------------------------------------------------


def naive(results: Results, part: str) -> Section:
    """Show ACNML against naive CNML around one posterior: the figures of appendix C."""
    compared: Compared | None = results.extras.get(part)
    heading = {
        SUBSET: "Naive CNML with few training images",
        WHOLE: "Naive CNML with all training images",
    }[part]
    if compared is None:
        return Section(heading)
    settings = compared.settings
    scattered = [compared.shifts[UPRIGHT], compared.shifts[RANDOM]]
    panels = [Panels({f"{part}-scatter": scatter(scattered)}, _caption(compared), "scroll")]
    if settings.lines:
        drawn = {f"{part}-{s}": over_rotation(compared, s, t) for s, t in TITLES.items()}
        text = (
            f"All methods on the same {settings.lines} images of every angle; the calibration "
            f"error has {counted(bins_for(settings.lines), 'bin')} of equally many images."
        )
        panels.append(Panels(drawn, text))
    matched = min(compared.matches, key=lambda match: match.distance)
    rows = [[f"{match.alpha:g}", f"{match.distance:.4f}"] for match in compared.matches]
    ends = (compared.matches[0], compared.matches[-1])
    at_end = ", the end of the grid" if matched in ends else ""
    caption = (
        "α by matching naive CNML (appendix A): the mean absolute difference between the "
        f"likelihoods of all labels on the upright queries is least for α = {matched.alpha:g}"
        f"{at_end}."
    )
    table = Table(caption, ("α", "distance to naive CNML"), rows)
    numbers = {f"{part}.csv": (COLUMNS, query_rows(compared))}
    return Section(heading, panels=panels, tables=[table, scores_table(compared)], numbers=numbers)


COLUMNS = ("method", "shift", "query", "normaliser", "nll", "confidence", "correct")


def query_rows(compared: Compared) -> list[list[object]]:
    """Return the numbers of every query by every method, as the scatter plots show them."""
    rows: list[list[object]] = []
    for shift, found in compared.shifts.items():
        for name in found.log_lik:
            each = (found.normaliser(name), found.nll(name), found.confidence(name))
            correct = found.log_probs(name).argmax(1) == found.labels
            values = zip(*(tensor.tolist() for tensor in (*each, correct)), strict=True)
            rows += [
                [name, shift, query, *numbers, int(right)]
                for query, (*numbers, right) in enumerate(values)
            ]
    return rows


def _caption(compared: Compared) -> str:
    settings, count = compared.settings, len(compared.shifts[UPRIGHT].labels)
    return (
        f"{count:,} upright queries and {count:,} at random angles. Network and posterior were "
        f"trained on {compared.train_images:,} images. Naive CNML trains for {settings.epochs} "
        "epochs on these and the query, once for every label; crosses take the highest likelihood "
        "of the last epoch. Both start from the posterior’s mean. On the dashed diagonal both "
        "agree."
    )


def scores_table(compared: Compared) -> Table:
    """Return the scores of all methods on the queries of the scatter plots."""
    rows = []
    for shift in (UPRIGHT, RANDOM):
        found = compared.shifts[shift]
        for name in found.log_lik:
            scores = _scores(found, name)
            cells = [f"{scores[s]:.3f}" for s in ("accuracy", "nll", "brier", "ece")]
            rows.append([name, shift, *cells, f"{found.confidence(name).mean():.3f}"])
    head = ("method", "shift", "accuracy", "NLL", "Brier score", "ECE", "mean confidence")
    count = len(compared.shifts[UPRIGHT].labels)
    return Table(
        f"All methods on {count:,} queries, {counted(bins_for(count), 'bin')}.", head, rows
    )


def _scores(comparison: Comparison, method: str) -> Mapping[str, float]:
    labels = comparison.labels
    return metrics.summary(comparison.log_probs(method), labels, bins_for(len(labels)))


def over_rotation(compared: Compared, score: str, title: str) -> Figure:
    """Draw a score against the angle, a line per method."""
    figure, axes = panel(title, (5.0, 4.0))
    angles = sorted(compared.settings.angles)
    at_angles = [compared.shifts[f"{a}°"].first(compared.settings.lines) for a in angles]
    for name, look in LOOKS.items():
        values = [_scores(each, name)[score] for each in at_angles]
        axes.plot(angles, values, look.marker, linestyle="-", color=look.colour, label=look.label)
    Axis({float(a): () for a in angles}, "rotation", "{x:.0f}°").dress(axes)
    legend_below(figure)
    return figure


def scatter(comparisons: Sequence[Comparison]) -> Figure:
    """Draw ACNML against naive CNML: normaliser, NLL of the true label, and confidence."""
    with mpl.rc_context(STYLE):
        rows = len(comparisons)
        figure = Figure(figsize=(9.4, 3.1 * rows), layout="constrained")
        grid = figure.subplots(rows, 3, squeeze=False)
        for line, comparison in zip(grid, comparisons, strict=True):
            where = "upright" if comparison.shift == UPRIGHT else "random rotation"
            for axes, (name, quantity) in zip(line, QUANTITIES.items(), strict=True):
                axes.set_title(f"{name}, {where}")
                _draw_pairs(axes, {m: quantity(comparison, m) for m in (ACNML, NAIVE, NAIVE_MAX)})
        grid[0][0].legend(fontsize=7.5, frameon=False)
    return figure


Quantity = Callable[[Comparison, str], Tensor]  # of every query (B,)
QUANTITIES: Mapping[str, Quantity] = {
    "Normaliser C(x)": Comparison.normaliser,
    "NLL": Comparison.nll,
    "Confidence": Comparison.confidence,
}


def _draw_pairs(axes: Axes, values: Mapping[str, Tensor]) -> None:
    ours = values[ACNML]
    for name, colour, marker in ((NAIVE, BLUE, "o"), (NAIVE_MAX, GREEN, "x")):
        axes.scatter(values[name], ours, 16, color=colour, marker=marker, label=name, alpha=0.6)
    every = torch.cat(list(values.values()))
    ends = [every.min().item(), every.max().item()]
    axes.plot(ends, ends, color=FAINT, linestyle=DASHES, linewidth=1)
    axes.set(xlabel="naive CNML", ylabel="ACNML")
