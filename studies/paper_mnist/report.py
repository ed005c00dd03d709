"""The sections of the report about the paper's MNIST experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, get_type_hints

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from acnml import metrics
from acnml.plots import BLUE, DASHES, FAINT, ORANGE, PINK, STYLE
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
from studies.rotated_mnist.settings import RANDOM, UPRIGHT, degrees

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
            [method for method in results.study.methods if method.posterior == "BBP"],
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
    found: Compared | list[dict[str, str]] | None = results.extras.get(part)
    heading = {
        SUBSET: "Naive CNML with few training images",
        WHOLE: "Naive CNML with all training images",
    }[part]
    if found is None:
        return Section(heading)
    lines = {SUBSET: results.study.settings.subset, WHOLE: results.study.settings.whole}[part].lines
    if isinstance(found, list):  # rows of a CSV file, whose figures are drawn again
        return Section(
            heading, panels=[Panels(figures(part, [*map(Query.read, found)], lines), "")]
        )
    compared, queries = found, query_rows(found)
    text = (
        f"{_caption(compared)} Lines: all methods on the same {lines} images of every angle; the "
        f"calibration error has {counted(bins_for(lines or 1), 'bin')} of equally many images."
    )
    panels = [Panels(figures(part, queries, lines), text, "scroll")]
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
    numbers = {f"{part}.csv": (Query._fields, queries)}
    return Section(heading, panels=panels, tables=[table, scores_table(compared)], numbers=numbers)


class Query(NamedTuple):
    """What one method makes of one query: a row of a CSV file, and a point of the figures."""

    method: str
    shift: str
    query: int
    normaliser: float
    nll: float
    brier: float
    confidence: float
    correct: int

    @classmethod
    def read(cls, row: Mapping[str, str]) -> Query:
        """Return a row of a CSV file; older files have no Brier scores."""
        words: dict[str, Any] = {"brier": "nan", **row}
        kinds = get_type_hints(cls)
        return cls(**{field: kinds[field](words[field]) for field in cls._fields})


def query_rows(compared: Compared) -> list[Query]:
    """Return the numbers of every query by every method."""
    rows: list[Query] = []
    for shift, found in compared.shifts.items():
        for name in found.log_lik:
            log_probs = found.log_probs(name)
            target = torch.nn.functional.one_hot(found.labels, log_probs.shape[1])
            brier = (log_probs.exp() - target).square().sum(1)
            each = (found.normaliser(name), found.nll(name), brier, found.confidence(name))
            correct = (log_probs.argmax(1) == found.labels).long()
            values = zip(*(tensor.tolist() for tensor in (*each, correct)), strict=True)
            rows += [Query(name, shift, query, *numbers) for query, numbers in enumerate(values)]
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


def figures(part: str, queries: Sequence[Query], lines: int) -> dict[str, Figure]:
    """Draw ACNML against naive CNML, and where there are lines all methods against the angle."""
    drawn = {f"{part}-scatter": scatter(queries)}
    if lines:
        first = [query for query in queries if query.query < lines and query.shift != RANDOM]
        drawn |= {f"{part}-{score}": over_rotation(first, score, t) for score, t in TITLES.items()}
    return drawn


def over_rotation(queries: Sequence[Query], score: str, title: str) -> Figure:
    """Draw a score against the angle, a line per method."""
    figure, axes = panel(title, (5.0, 4.0))
    angles = sorted({degrees(query.shift) for query in queries})
    for name, look in LOOKS.items():
        own = [query for query in queries if query.method == name]
        values = [_score([q for q in own if degrees(q.shift) == a], score) for a in angles]
        axes.plot(angles, values, look.marker, linestyle="-", color=look.colour, label=look.label)
    Axis({float(a): () for a in angles}, "rotation", "{x:.0f}°").dress(axes)
    legend_below(figure)
    return figure


def _score(queries: Sequence[Query], score: str) -> float:
    """Return a score of one method, from what is known of every query."""
    if score != "ece":
        return fmean(getattr(q, {"accuracy": "correct"}.get(score, score)) for q in queries)
    pairs = [(q.confidence, float(q.correct)) for q in queries]
    confidence, correct = torch.tensor(pairs, dtype=torch.float64).T
    return metrics.ece_of_confidences(confidence, correct, bins_for(len(queries)))


def scatter(queries: Sequence[Query]) -> Figure:
    """Draw ACNML against naive CNML: normaliser, NLL of the true label, and confidence."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.4, 6.2), layout="constrained")
        grid = figure.subplots(2, 3)
        for line, (shift, where) in zip(grid, PLACES.items(), strict=True):
            for axes, (name, column) in zip(line, QUANTITIES.items(), strict=True):
                axes.set_title(f"{name}, {where}")
                _draw_pairs(axes, [q for q in queries if q.shift == shift], column)
        grid[0][0].legend(fontsize=7.5, frameon=False)
    return figure


PLACES = {UPRIGHT: "upright", RANDOM: "random rotation"}
QUANTITIES = {"Normaliser C(x)": "normaliser", "NLL": "nll", "Confidence": "confidence"}


def _draw_pairs(axes: Axes, queries: Sequence[Query], column: str) -> None:
    values = {
        name: [getattr(q, column) for q in queries if q.method == name]
        for name in (ACNML, NAIVE, NAIVE_MAX)
    }
    for name, marker in ((NAIVE, "o"), (NAIVE_MAX, "x")):
        style: dict[str, Any] = {"color": LOOKS[name].colour, "marker": marker, "alpha": 0.7}
        axes.scatter(values[name], values[ACNML], 16, label=name, **style)
    every = [value for each in values.values() for value in each]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color=FAINT, linestyle=DASHES, linewidth=1)
    axes.set(xlabel="naive CNML", ylabel="ACNML")
