"""The table, the figure and the pages of the study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from acnml.plots import STYLE
from studies.engine.report import Panels, Section, ShortReport
from studies.engine.tables import Table, select
from studies.fidelity.methods import (
    DIAGONAL,
    EKFAC,
    FULL,
    GLM,
    IF_COMP,
    INFLUENCE,
    LAST,
    LINEARISED,
    NETWORK,
    PNML,
    SOLVED,
    TEMPERATURE,
)
from studies.fidelity.settings import LOGISTIC, PRESETS, FidelityStudy
from studies.fidelity.study import ALL, CONVERGED, Compared, Facts, collect
from studies.store import Store

__all__ = ["PRESETS", "run"]

# (method, posterior, colour, marker) of the lines of the figure; Okabe and Ito's palette.
LINES = (
    (SOLVED, FULL, "#0072b2", "o"),
    (SOLVED, EKFAC, "#56b4e9", "^"),
    (SOLVED, DIAGONAL, "#009e73", "s"),
    (LINEARISED, LAST + EKFAC, "#e69f00", "D"),
    (INFLUENCE, EKFAC, "#cc79a7", "v"),
    (IF_COMP, EKFAC, "#d55e00", "P"),
    (PNML, "", "#8c6bb1", "X"),
    (GLM, EKFAC, "#7f7f7f", "<"),
)
NAMES = ("variation", "log_lik_error", "regret_error", "regret_rank", "confidence_rank")
HEAD = (
    *("method", "posterior", "α", "total variation", "error of log p", "error of log C"),
    *("rank of log C", "rank of confidence", "NLL − CNML's", "solved"),
)


def run(study: FidelityStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    return write_pages(study, *collect(study, store), out, command)


def write_pages(
    study: FidelityStudy,
    rows: Sequence[Compared],
    facts: Sequence[Facts],
    out: Path,
    command: str,
) -> Path:
    """Write metrics.csv, facts.csv, results.md, the figure and report.html; return the last."""
    sections = [
        Section("CNML", [about(study)], [], [facts_table(facts)]),
        Section("By α", [ALPHA], [Panels({"fidelity": figure(study, rows)}, CAPTION)], []),
        Section("At α = 1", [READING], [], [at_one(rows, fact.problem) for fact in facts]),
        Section("Best α", [BEST], [], [best(rows, fact.problem) for fact in facts]),
    ]
    return ShortReport(
        "Fidelity",
        verdict(rows, facts),
        sections,
        command,
        {
            "metrics.csv": (Compared._fields, [_cells(row) for row in rows]),
            "facts.csv": (Facts._fields, facts),
        },
        appendix=["![Total variation distance to CNML by α](fidelity.png)"],
    ).write(out)


CAPTION = (
    "Mean total variation distance to CNML over all queries. Horizontal lines are methods without "
    "α. Lower is closer."
)
ALPHA = (
    "CNML gives the query the weight of one training datum, so α = 1 is the natural choice. Other "
    "values of α show what a wrong scale of the posterior costs, and where first-order estimates "
    "hold."
)
READING = (
    "*Error of log p* is the mean |log p_θ̂_y(y|x) − CNML's| over all labels, *error of log C* that "
    "of the regret. Ranks are Spearman's correlations with CNML, over queries. *Solved* is the "
    "share of labels with a residual of at most 0.1. In bold: the closest in total variation; ± is "
    "a standard error over queries."
)
BEST = "Every method at the α of least total variation: what α can make up for, in hindsight."


def about(study: FidelityStudy) -> str:
    """Say how CNML was computed."""
    return (
        f"{study.queries} queries for every problem: one half from the test data, the other half "
        f"rotated by {study.angle:g}°. For every label of every query the network is trained again "
        "on all training data and the labelled query, with the same prior, in double precision: "
        "from the trained weights by L-BFGS until the gradient is below 1e-5 posterior standard "
        f"deviations (*converged*: below {CONVERGED:g}). Logistic regression has one optimum, "
        "which `acnml.exact` finds by Newton's method. The optimum of a network is the one that is "
        "reached from the trained weights; others may exist. All posteriors have the prior of the "
        "training. The temperature is that of least NLL on held-out data."
    )


def facts_table(facts: Sequence[Facts]) -> Table:
    """Return what is known of every problem."""
    head = (
        *("problem", "weights", "training data", "accuracy", "temperature"),
        *("mean log C", "rotated", "NLL, network", "NLL, CNML", "converged"),
    )
    lines = [
        [
            *(f.problem, str(f.parameters), str(f.train), f"{f.accuracy:.3f}"),
            *(f"{f.temperature:.2f}", f"{f.regret:.3f}", f"{f.rotated_regret:.3f}"),
            *(f"{f.network_nll:.3f}", f"{f.cnml_nll:.3f}", f"{f.converged:.3f}"),
        ]
        for f in facts
    ]
    return Table("", head, lines)


def at_one(rows: Sequence[Compared], problem: str) -> Table:
    """Return all methods at α = 1, which is CNML's weight of the query."""
    own = select(rows, problem=problem, queries=ALL)
    chosen = [row for row in own if math.isnan(row.alpha) or row.alpha == 1]
    return _table(f"{problem}, α = 1.", chosen)


def best(rows: Sequence[Compared], problem: str) -> Table:
    """Return every method at the α that is closest to CNML."""
    own = select(rows, problem=problem, queries=ALL)
    return _table(f"{problem}, best α.", _best(own))


def _best(rows: Sequence[Compared]) -> list[Compared]:
    keys = dict.fromkeys((row.method, row.posterior) for row in rows)
    each = [[r for r in rows if (r.method, r.posterior) == key] for key in keys]
    return [min(some, key=_variation) for some in each]


def _variation(row: Compared) -> float:
    return math.inf if math.isnan(row.variation) else row.variation


def _table(caption: str, rows: Sequence[Compared]) -> Table:
    least = min(map(_variation, rows))
    lines = []
    for row in rows:
        numbers = [_number(getattr(row, name)) for name in NAMES]
        numbers[0] = f"**{numbers[0]}**" if row.variation == least else numbers[0]
        numbers[0] += "" if math.isnan(row.variation) else f" ± {row.variation_error:.3f}"
        alpha = "" if math.isnan(row.alpha) else f"{row.alpha:g}"
        difference = "" if math.isnan(row.nll) else f"{row.nll_difference:+.3f}"
        lines.append([row.method, row.posterior, alpha, *numbers, difference, _number(row.solved)])
    return Table(caption, HEAD, lines)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _cells(row: Compared) -> list[object]:
    return ["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row]


def figure(study: FidelityStudy, rows: Sequence[Compared]) -> Figure:
    """Draw the distance to CNML by α, one panel for every problem."""
    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(3.2 * len(study.problems), 4.8), layout="constrained")
        panels = drawing.subplots(1, len(study.problems), sharey=True, squeeze=False)[0]
        for axes, problem in zip(panels, study.problems, strict=True):
            own = select(rows, problem=problem.name, queries=ALL)
            for method, posterior, colour, marker in LINES:
                # A linear model is solved by its linearisation.
                exact = LINEARISED if problem.name == LOGISTIC and method == SOLVED else method
                line = [r for r in select(own, method=exact, posterior=posterior) if r.n]
                name = f"{method}, {posterior}" if posterior else method
                x, y = [r.alpha for r in line], [r.variation for r in line]
                axes.plot(x, y, color=colour, marker=marker, label=name)
            for method, style in ((NETWORK, ":"), (TEMPERATURE, "--")):
                (level,) = select(own, method=method)
                axes.axhline(level.variation, color="#444444", linestyle=style, label=method)
            axes.set(xscale="log", yscale="log", title=problem.name, xlabel="α")
        panels[0].set_ylabel("total variation distance to CNML")
        handles, labels = panels[-1].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return drawing


def verdict(rows: Sequence[Compared], facts: Sequence[Facts]) -> str:
    """Say which method is closest to CNML at α = 1, problem by problem."""
    parts = []
    for fact in facts:
        own = select(rows, problem=fact.problem, queries=ALL, alpha=1.0)
        first = min(own, key=_variation)
        (plain,) = select(rows, problem=fact.problem, queries=ALL, method=NETWORK)
        posterior = f" ({first.posterior})" if first.posterior else ""
        parts.append(
            f"{fact.problem}: {first.method}{posterior}, {first.variation:.3f} (the network: "
            f"{plain.variation:.3f})"
        )
    return f"Closest to CNML at α = 1, by total variation: {'; '.join(parts)}."
