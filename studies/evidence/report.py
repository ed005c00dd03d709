"""The pages of the study: short tables of means, differences, detection, and two figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from studies.corruptions.cifar10_c import official_folder
from studies.drawing import label_ends, panel
from studies.engine.report import Numbers, Panels, Section, ShortReport
from studies.engine.tables import Table, mean, select
from studies.evidence.comparisons import (
    BEFORE,
    RIVALS,
    Cases,
    Comparison,
    Correlation,
    Mean,
    cases,
    comparisons,
    correlations,
    means,
)
from studies.evidence.measures import is_missing
from studies.evidence.methods import (
    ACNML,
    AT_ALL_PRICES,
    CLOSED,
    DAC,
    DENSITY,
    EQUAL,
    OWN_CHOICE,
    PLAIN,
    PROCAL,
    TEMPERATURE,
    WITH_REGRET,
)
from studies.evidence.settings import PRESETS as PRESETS
from studies.evidence.settings import PRICE, TITLES, EvidenceStudy
from studies.evidence.study import Evidence, Known, collect
from studies.evidence.subjects import CLEAN
from studies.store import Store

DEFAULT = CLOSED[2]  # of `calibrate`, since this study
SHOWN = (PLAIN, TEMPERATURE, EQUAL, DAC, PROCAL, DENSITY[2], ACNML[2], CLOSED[2], BEFORE)
COLOURS = {
    EQUAL: "#8a9099",
    DAC: "#1b7837",
    DENSITY[2]: "#d95f02",
    ACNML[2]: "#1f77b4",
    CLOSED[2]: "#7b3294",
    BEFORE: "#c2a5cf",
}


class DetectedMean(NamedTuple):
    """A score that detects inputs: means over shifts and seeds."""

    network: str
    group: str
    score: str
    auroc: float
    aupr: float
    fpr95: float


def shifted(found: Sequence[Mean]) -> list[tuple[str, str]]:
    """Return all networks with their groups of shifts."""
    return list(dict.fromkeys((one.network, one.group) for one in found if one.group != CLEAN))


def strongest(found: Sequence[Mean]) -> list[tuple[str, str]]:
    """Return every network with the labelled group at which its NLL is highest."""
    plain = select(found, method=PLAIN, price=PRICE)
    labelled = [one for one in plain if one.group != CLEAN and not math.isnan(one.nll)]
    best = {one.network: one for one in sorted(labelled, key=lambda one: one.nll)}
    return [
        place for place in shifted(found) if place in {(o.network, o.group) for o in best.values()}
    ]


def number(value: float) -> str:
    """Return a number with three decimals, or nothing."""
    return "" if math.isnan(value) else f"{value:.3f}"


def scores_table(found: Sequence[Mean], price: float, methods: Sequence[str]) -> Table:
    """Return ECE / NLL of methods for every network and group."""
    at = {(o.network, o.group, o.method): o for o in select(found, price=price)}
    lines = [
        [
            *(network, group),
            *(
                f"{number(one.ece)} / {number(one.nll)}".rstrip(" /") if one else ""
                for method in methods
                for one in [at.get((network, group, method))]
            ),
        ]
        for network, group in dict.fromkeys((o.network, o.group) for o in found)
    ]
    title = "the knob of least clean NLL" if price == OWN_CHOICE else f"+{price:g} nats"
    caption = f"ECE / NLL at {title}: means over shifts and seeds."
    return Table(caption, ("network", "shifts", *methods), lines)


def tried_table(found: Sequence[Mean]) -> Table:
    """Return the mean over networks, at their strongest shifts, of everything at one price."""
    at = {(o.network, o.group, o.method): o for o in select(found, price=PRICE)}
    places = strongest(found)
    lines = []
    for method in dict.fromkeys(one.method for one in found):
        own = [one for place in places if (one := at.get((*place, method)))]
        clean = [one for n, _ in places for one in select(found, network=n, group=CLEAN,
                 method=method, price=PRICE)]  # fmt: skip
        if own:
            cells = [number(mean(own, score)) for score in ("ece", "nll")]
            lines.append(
                [method, str(len(own)), *cells, number(mean(clean, "ece")) if clean else ""]
            )
    caption = (
        f"Means over networks at the strongest shift with labels of each, at +{PRICE:g} nats. "
        "Methods with fewer networks are not comparable."
    )
    return Table(caption, ("method", "networks", "ECE", "NLL", "ECE without shift"), lines)


def rivals_table(found: Sequence[Comparison], method: str, rival: str) -> Table:
    """Return the differences of a method to a rival, with intervals."""
    lines = []
    for ece in select(found, method=method, rival=rival, score="ece"):
        place = {"network": ece.network, "group": ece.group}
        nll = select(found, method=method, rival=rival, score="nll", **place)
        cells = [c for one in (ece, *nll) for c in (str(one.interval), one.counts)]
        lines.append([ece.network, ece.group, *cells, *([] if nll else ["", ""])])
    caption = (
        f"“{method}” minus “{rival}”: mean over shifts with a bootstrap interval of 95 % over test "
        "inputs, and shifts won : lost (in brackets: those whose own interval excludes 0)."
    )
    return Table(caption, ("network", "shifts", "ECE", "won : lost", "NLL", "won : lost"), lines)


def cases_table(found: Sequence[Cases]) -> Table:
    """Return how often every method is better than the rivals."""
    lines = []
    for method in dict.fromkeys(one.method for one in found):
        cells = [
            f"{own[0].won} : {own[0].lost}" if own else ""
            for rival in RIVALS
            for score in ("ece", "nll")
            for own in [select(found, method=method, rival=rival, score=score)]
        ]
        lines.append([method, *cells])
    head = ("method", *(f"{rival}: {score}" for rival in RIVALS for score in ("ECE", "NLL")))
    return Table("Networks with their groups of shifts, won : lost against rivals.", head, lines)


def detection_table(found: Sequence[DetectedMean]) -> Table:
    """Return AUROC / FPR95 for inputs of no class."""
    places = list(dict.fromkeys((one.network, one.group) for one in found))
    scores = list(dict.fromkeys(one.score for one in found))
    lines = []
    for score in scores:
        own = {(o.network, o.group): o for o in select(found, score=score)}
        cells = [f"{own[p].auroc:.3f} / {own[p].fpr95:.3f}" if p in own else "" for p in places]
        lines.append([score, *cells])
    head = ("score", *(f"{network}, {group}" for network, group in places))
    return Table("Clean inputs against those of no class: AUROC / FPR95.", head, lines)


def correlations_table(found: Sequence[Correlation]) -> Table:
    """Return what clean data tell of the gain."""
    lines = [
        [name, *(f"{one.correlation:+.2f} ({one.networks})" for one in select(found, known=name))]
        for name in dict.fromkeys(one.known for one in found)
    ]
    caption = (
        f"Rank correlation over networks of the gain of “{DEFAULT}” over the temperature of equal "
        "price with what is known from clean data; in brackets the number of networks."
    )
    return Table(caption, ("known from clean data", "gain in ECE", "gain in NLL"), lines)


def figures(study: EvidenceStudy, found: Sequence[Mean]) -> Panels:
    """Draw the ECE under the strongest shifts: by network, and by price."""
    places = strongest(found)
    dots, axes = panel("ECE under strong shift", (6.4, 0.38 * len(places) + 1.3))
    at = {(o.network, o.group, o.method): o for o in select(found, price=PRICE)}
    for row, place in enumerate(reversed(places)):
        values = {method: at[(*place, method)].ece for method in COLOURS}
        axes.plot(
            [min(values.values()), max(values.values())], [row, row], color="#d9dce1", zorder=1
        )
        for method, value in values.items():
            name = method if row == 0 else None
            axes.scatter(value, row, s=34, color=COLOURS[method], label=name, zorder=2)
    axes.set_yticks(range(len(places)), [TITLES.get(name, name) for name, _ in reversed(places)])
    axes.set(xlabel=f"ECE at +{PRICE:g} nats", xlim=(0, None))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=2)

    curves, axes = panel("Caution has a price", (5.6, 3.3))
    ends = {}
    for method in AT_ALL_PRICES:
        own = [one for one in select(found, method=method) if (one.network, one.group) in places]
        eces = [mean(select(own, price=price), "ece") for price in study.prices]
        axes.plot(study.prices, eces, marker="o", markersize=4, color=COLOURS[method])
        ends[method] = eces[-1]
    axes.set_xscale("log")
    axes.set_xticks(study.prices, [f"{price:g}" for price in study.prices])
    axes.minorticks_off()
    axes.set(xlabel="NLL paid on clean data (nats)", ylabel="mean ECE under strong shift")
    label_ends(axes, study.prices[-1], ends, COLOURS)
    caption = "Means over shifts and seeds; on the right also over networks."
    return Panels({"by-network": dots, "by-price": curves}, caption, "panels")


def about(study: EvidenceStudy) -> list[str]:
    """Describe the data."""
    corrupted = (
        "Corrupted images are those of the official CIFAR-10-C."
        if official_folder().is_dir()
        else "Corruptions are applied to the test images with the published parameters."
    )
    return [
        f"All knobs are chosen on clean held-out data, up to {study.held_out}. Scores and "
        f"posteriors are fitted on up to {study.train_images or 'all'} training images, and on all "
        f"training questions and rows. Every shift has up to {study.test} test inputs, and about "
        f"as many of no class where there are some. {corrupted} Pictures: {study.pictures} of "
        "every class for Tiny-ImageNet, half of that for Caltech-101; the other parts are shares. "
        "The network with 1,000 classes has a third of 1,000 pictures each for the score, for "
        "choosing and for testing: one picture a class, so that most classes have no mean.",
        "Networks and heads of our own differ in their random seeds. Published weights have no "
        "seed. metrics.csv has all means, comparisons.csv all differences to rivals.",
    ]


def verdict(counted: Sequence[Cases]) -> str:
    """Say how the default compares with the rivals."""
    parts = [
        f"{rival}: ECE {ece.won} : {ece.lost}, NLL {nll.won} : {nll.lost}"
        for rival in RIVALS
        if rival != DEFAULT
        for ece, nll in [
            [
                select(counted, method=DEFAULT, rival=rival, score=score)[0]
                for score in ("ece", "nll")
            ]
        ]
    ]
    return (
        f"Cases won : lost by “{DEFAULT}” at +{PRICE:g} nats, where a case is a network with a "
        f"group of shifts. Against {'; '.join(parts)}."
    )


def detected(evidence: Evidence) -> list[DetectedMean]:
    """Return means over shifts and seeds of what detects inputs of no class."""
    unlabelled = {(r.network, r.group) for r in evidence.rows if math.isnan(r.nll)}
    rows = [one for one in evidence.detected if (one.network, one.group) in unlabelled]
    left_out = {f"regret, {m}" for m in WITH_REGRET} - {f"regret, {m}" for m in AT_ALL_PRICES}
    keys = dict.fromkeys(
        (one.network, one.group, one.score) for one in rows if one.score not in left_out
    )
    return [
        DetectedMean(*key, *(mean(own, metric) for metric in ("auroc", "aupr", "fpr95")))
        for key in keys
        for own in [select(rows, network=key[0], group=key[1], score=key[2])]
    ]


def run(study: EvidenceStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the pages."""
    return write_pages(study, collect(study, out, store), out, command)


def write_pages(study: EvidenceStudy, evidence: Evidence, out: Path, command: str) -> Path:
    """Write the CSV files, the figures, results.md and report.html; return the path of the last."""
    averaged, found, seen = means(evidence.rows), comparisons(evidence), detected(evidence)
    counted, known = cases(found), correlations(evidence.known, averaged, DEFAULT)
    lines = [["" if is_missing(value) else value for value in row] for row in averaged]
    numbers: dict[str, Numbers] = {
        "metrics.csv": (Mean._fields, lines),
        "comparisons.csv": (Comparison._fields, found),
        "cases.csv": (Cases._fields, counted),
        "detection.csv": (DetectedMean._fields, seen),
        "known.csv": (Known._fields, evidence.known),
        "correlations.csv": (Correlation._fields, known),
    }
    sections = [
        Section(
            "Scores",
            about(study),
            # Questions of no intent are the only shift of CLINC150: nothing to draw by itself.
            [figures(study, averaged)] if strongest(averaged) else [],
            [scores_table(averaged, PRICE, SHOWN)],
        ),
        Section("Everything tried", [], [], [tried_table(averaged)]),
        Section(
            "At their own choice",
            [],
            [],
            [scores_table(averaged, OWN_CHOICE, (*AT_ALL_PRICES[1:], DAC, PROCAL))],
        ),
        Section("Cases", [], [], [cases_table(counted)]),
        *(
            Section(f"Against “{rival}”", [], [], [rivals_table(found, DEFAULT, rival)])
            for rival in RIVALS
            if rival != DEFAULT
        ),
        Section("Inputs of no class", [], [], [detection_table(seen)]),
        Section("Can clean data tell?", [], [], [correlations_table(known)]),
    ]
    return ShortReport("Evidence", verdict(counted), sections, command, numbers).write(out)


__all__ = ["PRESETS", "run", "write_pages"]
