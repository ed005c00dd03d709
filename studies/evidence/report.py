"""The pages of the study: tables by network and group of shifts, and who wins against whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from studies.corruptions.cifar10_c import official_folder
from studies.drawing import panel
from studies.engine.report import Numbers, Panels, Section, ShortReport
from studies.engine.tables import Table, mean, select, shown
from studies.evidence.comparisons import (
    Cases,
    Comparison,
    cases,
    comparisons,
    groups,
    priced,
    seed_means,
)
from studies.evidence.measures import Scored, is_missing
from studies.evidence.methods import (
    ACNML,
    CLOSED_FORM,
    DENSITY,
    ENSEMBLE,
    ENSEMBLE_ACNML,
    EQUAL,
    ISOTROPIC,
    OWN_CHOICE,
    WEIGHED,
    WITH_REGRET,
)
from studies.evidence.settings import (
    DIGITS,
    DIGITS_200,
    GIVEN,
    LETTERS,
    OWN,
    TABLES,
    TEXT,
    EvidenceStudy,
)
from studies.evidence.settings import PRESETS as PRESETS
from studies.evidence.study import Evidence, collect
from studies.store import Store

DRAWN = {
    EQUAL: "#8a9099",
    DENSITY: "#d95f02",
    ACNML: "#1f77b4",
    WEIGHED: "#6a3d9a",
    ISOTROPIC[2]: "#08306b",
    CLOSED_FORM: "#e7298a",
    ENSEMBLE: "#66a61e",
    ENSEMBLE_ACNML: "#1b7837",
}
# The scores were found on data of the first kind. Data of the second had no part in it.
FAMILIES: Mapping[str, Sequence[str]] = {
    "in which the scores were found": (DIGITS, *GIVEN, OWN),
    "fresh": (LETTERS, TEXT, TABLES),
}
SCORES = ("ece", "nll", "brier", "aurc", "accuracy")


def label(price: float) -> str:
    """Return a price as it is printed."""
    return "own choice" if price == OWN_CHOICE else f"+{price:g}"


def cell(rows: Sequence[Scored], score: str) -> str:
    """Return the mean over shifts, and its deviation over seeds."""
    values = seed_means(rows, score)
    return "" if any(map(math.isnan, values)) else shown(values)


def scores_table(study: EvidenceStudy, rows: Sequence[Scored], network: str, group: str) -> Table:
    """Return the mean scores of all methods in a group of shifts."""
    inside, lines = select(rows, network=network, group=group), []
    with_price = priced(inside)
    for price in (*study.prices, OWN_CHOICE):
        every = list(dict.fromkeys(row.method for row in inside))
        for method in every if price == study.prices[0] else with_price:
            own = select(inside, price=price, method=method)
            cells = [cell(own, score) for score in SCORES]
            lines.append([label(price) if method in with_price else "", method, *cells])
    head = ("price", "method", "ECE", "NLL", "Brier", "AURC", "accuracy")
    seeds = len({row.seed for row in inside})
    over = f" and {seeds} seeds; ± is the standard deviation over seeds" if seeds > 1 else ""
    return Table(f"{network}, {group}: means over shifts{over}.", head, lines)


def rivals_table(found: Sequence[Comparison], rival: str, price: float) -> Table:
    """Return the differences of all methods to a rival."""
    lines = []
    for ece in select(found, rival=rival, price=price, score="ece"):
        nll = select(
            found,
            **{k: getattr(ece, k) for k in ("network", "group", "price", "method", "rival")},
            score="nll",
        )
        cells = [c for one in (ece, *nll) for c in (str(one.interval), one.counts)]
        lines.append([ece.network, ece.group, ece.method, *cells, *([] if nll else ["", ""])])
    caption = (
        f"Difference to “{rival}” at {label(price)} nats: mean over shifts with a bootstrap "
        "interval of 95 % over test inputs, and shifts won : lost (in brackets: those whose own "
        "interval excludes 0). Negative is better. comparisons.csv has all prices."
    )
    head = ("network", "shifts", "method", "ECE", "won : lost", "NLL", "won : lost")
    return Table(caption, head, lines)


def cases_table(found: Sequence[Cases]) -> Table:
    """Return how often the means of a method are lower than a rival's."""
    lines = []
    for networks, method, rival in dict.fromkeys((c.networks, c.method, c.rival) for c in found):
        own = select(found, networks=networks, method=method, rival=rival)
        cells = [f"{one.lower} of {one.cases}" for one in own]
        lines.append([networks, method, rival, *cells, *[""] * (3 - len(cells))])
    caption = (
        "Cases in which the mean of a method is lower than its rival's. A case is a network with a "
        "group of shifts and a price."
    )
    return Table(caption, ("data", "method", "rival", "ECE", "NLL", "Brier"), lines)


def detection_table(study: EvidenceStudy, rows: Sequence[Scored]) -> Table:
    """Return AUROC, AUPR and FPR95 of clean against shifted inputs, at the middle price."""
    price = study.prices[len(study.prices) // 2]
    lines = []

    def measured(own: Sequence[Scored], by: str) -> str:
        values = [mean(own, f"{metric}_{by}") for metric in ("auroc", "aupr", "fpr95")]
        return " / ".join(f"{value:.3f}" for value in values)

    for network, group in groups(rows):
        inside = select(rows, network=network, group=group, price=price)
        for method in dict.fromkeys(row.method for row in inside):
            own = select(inside, method=method)
            known = method in WITH_REGRET and not any(is_missing(r.auroc_regret) for r in own)
            regret = measured(own, "regret") if known else ""
            lines.append([network, group, method, measured(own, "confidence"), regret])
        lines.append([network, group, "s(x) alone", measured(inside, "typicality"), ""])
    caption = (
        f"Clean against shifted inputs, or against those of no class, at {label(price)} nats: "
        "AUROC / AUPR / FPR95. Shifted inputs are the positives."
    )
    return Table(caption, ("network", "shifts", "method", "by confidence", "by regret"), lines)


def beats_everywhere(found: Sequence[Comparison]) -> list[str]:
    """Name the methods that are better than the density temperature in mean ECE and NLL always."""
    rows = [one for one in found if one.rival == DENSITY and one.score != "brier"]
    methods = dict.fromkeys(one.method for one in rows)
    networks = {one.network for one in rows}
    return [
        method
        for method in methods
        for own in [select(rows, method=method)]
        if {one.network for one in own} == networks and all(one.mean < 0 for one in own)
    ]


def verdict(study: EvidenceStudy, found: Sequence[Comparison]) -> str:
    """Say what beats the density temperature, and how ACNML does against plain temperatures."""
    best = beats_everywhere(found)
    rival = (
        f"Better than the density temperature in mean ECE and NLL for every network, group and "
        f"price: {', '.join(best)}."
        if best
        else "No method is better than the density temperature in both mean ECE and NLL for every "
        "network, group of shifts and price."
    )
    price = study.prices[len(study.prices) // 2]
    parts = []
    for method in (WEIGHED, ISOTROPIC[2], CLOSED_FORM, DENSITY):
        counts = []
        for score in ("ece", "nll"):
            own = select(found, rival=EQUAL, price=price, method=method, score=score)
            won, surely_won, lost, surely_lost = (
                sum(getattr(one, name) for one in own)
                for name in ("won", "surely_won", "lost", "surely_lost")
            )
            counts.append(f"{won} ({surely_won}) : {lost} ({surely_lost})")
        parts.append(f"{method}: ECE {counts[0]}, NLL {counts[1]}")
    return (
        f"{rival} Shifts won : lost against the temperature of equal price at +{price:g} nats, in "
        f"brackets those that are certain: {'; '.join(parts)}."
    )


def figures(study: EvidenceStudy, rows: Sequence[Scored]) -> Panels:
    """Draw ECE against NLL for every price, for the strongest shifts of every network."""
    plotted = {}
    for network in dict.fromkeys(row.network for row in rows):
        if (group := strongest(rows, network)) is None:
            continue
        inside = select(rows, network=network, group=group)
        figure, axes = panel(f"{network}, {group}", (3.8, 3.2))
        for method, colour in DRAWN.items():
            own = [select(inside, price=price, method=method) for price in study.prices]
            if not own[0]:
                continue
            points = [(mean(each, "nll"), mean(each, "ece")) for each in own]
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker="o", markersize=4, color=colour, label=method)
        axes.set(xlabel="NLL", ylabel="ECE")
        axes.legend(fontsize=7)
        plotted[f"prices-{network}"] = figure
    prices = ", ".join(label(price) for price in study.prices)
    return Panels(
        plotted, f"Means over shifts at {prices} nats; lower left is better.", "small panels"
    )


def strongest(rows: Sequence[Scored], network: str) -> str | None:
    """Return the group of shifts with labels at which the network has the highest NLL."""
    names = [group for own, group in groups(rows) if own == network]
    nlls = {name: mean(select(rows, network=network, group=name), "nll") for name in names}
    labelled = {name: nll for name, nll in nlls.items() if not math.isnan(nll)}
    return max(labelled, key=lambda name: labelled[name]) if labelled else None


def _corruptions() -> str:
    if official_folder().is_dir():
        return "Corrupted images are those of the official CIFAR-10-C."
    return "Corruptions are applied to the test images with the published parameters of CIFAR-10-C."


def about(study: EvidenceStudy) -> list[str]:
    """Describe the data."""
    return [
        f"All knobs are chosen on {study.held_out} clean held-out inputs (resnet20-own: 1,000, "
        f"{DIGITS_200}: 500, tables: a quarter of the rows), at prices over the NLL of the best "
        "temperature of the network, or for the least NLL (own choice). Posteriors and densities "
        f"are fitted on {study.train_images or 'all'} training images, and on all training "
        f"questions and rows. Every shift has {study.test} test inputs, and as many of no class "
        f"where there are some. {_corruptions()}",
        "Networks of our own differ in their random seeds. An ensemble consists of the networks "
        f"of all seeds ({DIGITS}: {study.members}), so there is one. MC dropout and ensembles are "
        "taken at their own best temperature where that costs more than the price, and otherwise "
        "at the temperature that costs the price.",
    ]


def run(study: EvidenceStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the pages."""
    return write_pages(study, collect(study, out, store), out, command)


def write_pages(study: EvidenceStudy, evidence: Evidence, out: Path, command: str) -> Path:
    """Write the CSV files, the figures, results.md and report.html; return the path of the last."""
    found = comparisons(evidence, study.prices)
    counted = cases(found, dict(FAMILIES))
    lines = [["" if is_missing(value) else value for value in row] for row in evidence.rows]
    numbers: Mapping[str, Numbers] = {
        "metrics.csv": (Scored._fields, lines),
        "comparisons.csv": (Comparison._fields, found),
        "cases.csv": (Cases._fields, counted),
    }
    price = study.prices[len(study.prices) // 2]
    sections = [
        Section("Prices", about(study), [figures(study, evidence.rows)], []),
        *(
            Section(f"Against “{rival}”", [], [], [rivals_table(found, rival, price)])
            for rival in (EQUAL, DENSITY, WEIGHED)
        ),
        Section("Cases", [], [], [cases_table(counted)]),
        Section("Detection", [], [], [detection_table(study, evidence.rows)]),
        Section(
            "Scores",
            [],
            [],
            [scores_table(study, evidence.rows, *each) for each in groups(evidence.rows)],
        ),
    ]
    return ShortReport("Evidence", verdict(study, found), sections, command, numbers).write(out)
