"""The pages of the study: tables by network and group of shifts, and who wins against whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from acnml.cli._shared.drawing import panel
from acnml.cli._shared.files import write_file
from studies.engine.report import Panels, Section, footer, short_report, written_by
from studies.engine.tables import Table, write_csv
from studies.evidence.measures import Interval, Scored
from studies.evidence.methods import (
    ACNML,
    DENSITY,
    EQUAL,
    LEVERAGE,
    METHODS,
    OWN_CHOICE,
    PLAIN,
    TEMPERATURE,
    WEIGHED,
    WITH_REGRET,
)
from studies.evidence.settings import EvidenceStudy
from studies.evidence.study import Evidence
from studies.evidence.subjects import CLEAN

DRAWN = {EQUAL: "#8a9099", DENSITY: "#d95f02", ACNML: "#1f77b4", WEIGHED: "#08306b"}
PRICED = tuple(method for method in METHODS if method not in (PLAIN, TEMPERATURE))


def select(rows: Sequence[Scored], **wanted: object) -> list[Scored]:
    """Return the rows with these values."""
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def mean(rows: Sequence[Scored], score: str) -> float:
    """Return the mean over shifts."""
    return float(sum(getattr(row, score) for row in rows) / len(rows))


def groups(rows: Sequence[Scored]) -> list[tuple[str, str]]:
    """Return all networks with their groups of shifted images."""
    return list(dict.fromkeys((r.network, r.group) for r in rows if r.group != CLEAN))


def label(price: float) -> str:
    """Return a price as it is printed."""
    return "own choice" if price == OWN_CHOICE else f"+{price:g}"


def scores_table(study: EvidenceStudy, rows: Sequence[Scored], network: str, group: str) -> Table:
    """Return the mean scores of all methods in a group of shifts."""
    lines = []
    for price in (*study.prices, OWN_CHOICE):
        for method in METHODS if price == study.prices[0] else PRICED:
            own = select(rows, network=network, group=group, price=price, method=method)
            cells = [f"{mean(own, s):.3f}" for s in ("ece", "nll", "brier", "aurc", "accuracy")]
            lines.append([label(price) if method in PRICED else "", method, *cells])
    head = ("price", "method", "ECE", "NLL", "Brier", "AURC", "accuracy")
    return Table(f"{network}, {group}: means over shifts.", head, lines)


def difference(evidence: Evidence, rows: Sequence[Scored], other: str, score: str) -> Interval:
    """Return the mean difference to another method over the shifts of some rows of a method."""
    means, draws = [], []
    for row in rows:
        place = (row.network, row.shift, row.price)
        rival = evidence.by_key[(*place, other)]
        means.append(getattr(row, score) - getattr(rival, score))
        own, its = (evidence.resampled[(*place, m, score)] for m in (row.method, other))
        draws.append(own - its)
    return Interval.of(sum(means) / len(means), torch.stack(draws).double().mean(0))


def won_and_lost(evidence: Evidence, rows: Sequence[Scored], other: str, score: str) -> str:
    """Count shifts won and lost, and in brackets those whose interval excludes 0."""
    single = [difference(evidence, [row], other, score) for row in rows]
    won, lost = (sum(each.mean * sign > 0 for each in single) for sign in (-1, 1))
    clearly = sum(each.high < 0 for each in single), sum(each.low > 0 for each in single)
    return f"{won} ({clearly[0]}) : {lost} ({clearly[1]})"


def rivals_table(study: EvidenceStudy, evidence: Evidence, other: str) -> Table:
    """Return the differences of all methods to a rival."""
    lines = []
    for network, group in groups(evidence.rows):
        for price in study.prices:
            for method in PRICED:
                if method == other:
                    continue
                own = select(
                    evidence.rows, network=network, group=group, price=price, method=method
                )
                cells = []
                for score in ("ece", "nll"):
                    cells += [
                        str(difference(evidence, own, other, score)),
                        won_and_lost(evidence, own, other, score),
                    ]
                lines.append([network, group, label(price), method, *cells])
    caption = (
        f"Difference to “{other}” at equal price: mean over shifts with a bootstrap interval of "
        "95 % over images, and shifts won : lost (in brackets: those whose own interval excludes "
        "0). Negative is better."
    )
    head = ("network", "shifts", "price", "method", "ECE", "won : lost", "NLL", "won : lost")
    return Table(caption, head, lines)


def detection_table(study: EvidenceStudy, rows: Sequence[Scored]) -> Table:
    """Return AUROC and FPR95 of clean against shifted images, at the middle price."""
    price = study.prices[len(study.prices) // 2]
    lines = []
    for network, group in groups(rows):
        for method in METHODS:
            own = select(rows, network=network, group=group, price=price, method=method)
            shown = [("confidence", True), ("regret", method in WITH_REGRET)]
            cells = [
                f"{mean(own, f'auroc_{by}'):.3f} / {mean(own, f'fpr95_{by}'):.3f}" if known else ""
                for by, known in shown
            ]
            lines.append([network, group, method, *cells])
        typical = f"{mean(own, 'auroc_typicality'):.3f} / {mean(own, 'fpr95_typicality'):.3f}"
        lines.append([network, group, "s(x) alone", typical, ""])
    caption = f"Clean against shifted images at {label(price)} nats: AUROC / FPR95."
    return Table(caption, ("network", "shifts", "method", "by confidence", "by regret"), lines)


def beats_everywhere(study: EvidenceStudy, evidence: Evidence) -> list[str]:
    """Name the methods that are better than the density temperature in mean ECE and NLL always."""
    found = []
    for method in PRICED:
        pairs = [
            difference(evidence, own, DENSITY, score).mean
            for network, group in groups(evidence.rows)
            for price in study.prices
            for own in [
                select(evidence.rows, network=network, group=group, price=price, method=method)
            ]
            for score in ("ece", "nll")
        ]
        if method != DENSITY and all(each < 0 for each in pairs):
            found.append(method)
    return found


def verdict(study: EvidenceStudy, evidence: Evidence) -> str:
    """Say what beats the density temperature, and how ACNML does against plain temperatures."""
    best = beats_everywhere(study, evidence)
    rival = (
        f"Better than the density temperature in mean ECE and NLL for every network, group and "
        f"price: {', '.join(best)}."
        if best
        else "No method is better than the density temperature in both mean ECE and NLL for every "
        "network, group of shifts and price."
    )
    price = study.prices[len(study.prices) // 2]
    parts = []
    for method in (ACNML, WEIGHED, DENSITY, LEVERAGE):
        own = [r for r in select(evidence.rows, price=price, method=method) if r.group != CLEAN]
        counts = [won_and_lost(evidence, own, EQUAL, score) for score in ("ece", "nll")]
        parts.append(f"{method}: ECE {counts[0]}, NLL {counts[1]}")
    return (
        f"{rival} Shifts won : lost against the temperature of equal price at +{price:g} nats, in "
        f"brackets those that are certain: {'; '.join(parts)}."
    )


def figures(study: EvidenceStudy, rows: Sequence[Scored]) -> Panels:
    """Draw ECE against NLL for every price, for the last group of every network."""
    drawn = {}
    for network in study.networks:
        group = groups(select(rows, network=network))[-1][1]
        figure, axes = panel(f"{network}, {group}", (3.8, 3.2))
        for method, colour in DRAWN.items():
            own = [
                select(rows, network=network, group=group, price=p, method=method)
                for p in study.prices
            ]
            points = [(mean(each, "nll"), mean(each, "ece")) for each in own]
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=4, color=colour, label=method
            )
        axes.set(xlabel="NLL", ylabel="ECE")
        axes.legend(fontsize=7)
        drawn[f"prices-{network}"] = figure
    prices = ", ".join(label(price) for price in study.prices)
    return Panels(
        drawn, f"Means over shifts at {prices} nats; lower left is better.", "small panels"
    )


def write_pages(study: EvidenceStudy, evidence: Evidence, out: Path) -> Path:
    """Write metrics.csv, results.md and report.html; return the path of the last."""
    lines = [["" if _is_missing(cell) else cell for cell in row] for row in evidence.rows]
    write_csv(out / "metrics.csv", Scored._fields, lines)
    about = (
        f"All knobs are chosen on {study.held_out} clean held-out images, at prices over the NLL "
        "of the best temperature, or for the least NLL (own choice). Posteriors and densities are "
        f"fitted on {study.train_images or 'all'} training images. Every shift has {study.test} "
        "test images. CIFAR-10-C's corruptions are applied to the test images with the published "
        "parameters."
    )
    tables = [scores_table(study, evidence.rows, *each) for each in groups(evidence.rows)]
    sections = [
        Section("Prices", [about], [figures(study, evidence.rows)], []),
        Section("Scores", [], [], tables),
        Section(
            "Against the density temperature", [], [], [rivals_table(study, evidence, DENSITY)]
        ),
        Section(
            "Against the temperature of equal price", [], [], [rivals_table(study, evidence, EQUAL)]
        ),
        Section("Detection", [], [], [detection_table(study, evidence.rows)]),
    ]
    found = verdict(study, evidence)
    text = "\n\n".join(
        [
            "# Evidence: results",
            f"Written by {written_by('evidence')}.",
            found,
            *(section.markdown() for section in sections),
        ]
    )
    write_file(out / "results.md", (text + "\n").encode())
    page = short_report("Evidence", found, sections, footer("evidence"))
    return write_file(out / "report.html", page.encode())


def _is_missing(cell: object) -> bool:
    return isinstance(cell, float) and math.isnan(cell)
