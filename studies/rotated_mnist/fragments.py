"""Small pieces of the report: table rows, and what methods are called in them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from studies.rotated_mnist.looks import MATCHED
from studies.rotated_mnist.methods import LEAST_NLL, LINEARISED, METHODS, Method
from studies.rotated_mnist.results import Results
from studies.rotated_mnist.tables import knob_text
from studies.store import duration
from studies.study.knobs import TEMPERATURE
from studies.study.scores import PER_BIN
from studies.study.tables import html_row, shown


def label(method: Method) -> str:
    """Name a method in a table: its rule, what it stands on, how it is solved."""
    tempered = {True: "tempered ", False: ""}[method.knob == TEMPERATURE]
    least = ", T of least NLL" if method.choice == LEAST_NLL else ""
    solver = f", {method.solver}" if method.solver not in ("", LINEARISED) else ""
    return f"{tempered}{method.rule}, {method.posterior}{solver}{least}"


def scored(results: Results) -> list[Method]:
    """Return the methods whose calibration can be told: those with enough images for the bins."""
    enough = PER_BIN * results.study.bins
    return [method for method in METHODS if results.images([method]) >= enough]


def score_row(results: Results, method: Method, shifts: Sequence[str]) -> str:
    """Return how many images a method sees, its upright NLL, and its ECE at some shifts."""
    nll = shown(results.values(method, "nll", "0°"))
    eces = [shown(results.values(method, "ece", shift)) for shift in shifts]
    return html_row(label(method), [f"{results.images([method]):,}", nll, *eces])


def timing_row(name: str, seconds: float, plain: float | None) -> str:
    """Return what one image takes, and how many forward passes that is."""
    passes = f"{seconds / plain:,.1f}" if plain else "–"
    return html_row(name, [duration(seconds), passes])


def detection_rows(results: Results) -> str:
    """Return a row for every method and score, the best AUROC first."""
    by_key: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for found in results.detections:
        key = label(found.method), found.score
        by_key.setdefault(key, []).append((found.auroc, found.fpr95))
    ordered = sorted(by_key.items(), key=lambda item: -statistics.fmean(a for a, _ in item[1]))
    return "".join(
        html_row(name, [score, *(shown(values) for values in zip(*pairs, strict=True))])
        for (name, score), pairs in ordered
    )


def choices(results: Results) -> str:
    """Say where the knobs of matched methods stand, for the first seed."""
    ready = {r.method.name: r.method for r in results.rows if r.seed == results.study.seeds[0]}
    texts = [
        f"{label(method)}: {knob_text(ready[method.name])}"
        for method in MATCHED
        if method.knob and method.name in ready
    ]
    return f"Knobs of seed {results.study.seeds[0]}: {escape('; '.join(texts))}." if texts else ""
