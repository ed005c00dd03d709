"""The study's numbers as tables: metrics.csv, frontier.csv, and those of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from studies.cifar10_c import methods
from studies.cifar10_c.looks import knob_text, label
from studies.cifar10_c.methods import Method, images_of, methods_of
from studies.cifar10_c.results import STUDY, Results
from studies.cifar10_c.study import CLEAN
from studies.cifar10_c.verdict import mean_at
from studies.store import duration
from studies.study.scores import PER_BIN, Row
from studies.study.tables import METHOD, METRICS, SCORES, shown, write_csv

FRONTIER = (*METHOD, "held_out_nll", "severity", "n", "ece", "nll")
CLEAN_SCORES = ("nll", "accuracy", "ece")  # those of the paper's Table 2
Table = tuple[Sequence[str], list[list[str]]]  # a head and rows


def write_tables(results: Results, folder: Path) -> None:
    """Write metrics.csv and frontier.csv."""
    frontier, n = results.study.frontier, results.level(results.study.frontier.images)
    swept = (
        [*_words(p.method), p.held_out_nll, frontier.severity, n, p.ece, p.nll]
        for p in results.sweep
    )
    write_csv(folder / "metrics.csv", METRICS, (metrics_row(row) for row in results.rows))
    write_csv(folder / "frontier.csv", FRONTIER, swept)


def metrics_row(row: Row[Method]) -> list[object]:
    """Return a row of metrics.csv."""
    return [STUDY, *_words(row.method), *(getattr(row, name) for name in SCORES)]


def clean_table(results: Results) -> Table:
    """Return NLL, accuracy and ECE of clean images, as far as possible the same for all methods."""
    rows = []
    for method in _scored(results):
        n = _common(results, method, CLEAN)
        cells = [_with_error(results, method, score, n) for score in CLEAN_SCORES]
        rows.append([label(method), f"{n:,}", *cells])
    return ("method", "images", "NLL", "accuracy", "ECE"), [r for r in rows if r[2] != "–"]


def all_clean_table(results: Results) -> Table:
    """Return the same on all clean images, for methods that have seen more than others."""
    rows = []
    for method in methods_of(results.study):
        n = results.level(images_of(method, CLEAN, results.study))
        if n > _common(results, method, CLEAN):
            cells = [shown(results.values(method, score, CLEAN, n)) for score in CLEAN_SCORES]
            rows.append([label(method), f"{n:,}", *cells])
    return ("method", "images", "NLL", "accuracy", "ECE"), [r for r in rows if r[2] != "–"]


def severity_table(results: Results, score: str) -> Table:
    """Return the mean of a score over all corruptions, by severity, for every method."""
    severities, rows = sorted(results.study.severities), []
    for method in _scored(results):
        n = _common(results, method, "")
        means = [mean_at(results, method, score, severity, n) for severity in severities]
        if any(mean is not None for mean in means):
            cells = ["–" if mean is None else f"{mean:.3f}" for mean in means]
            rows.append([label(method), f"{n:,}", *cells])
    return ("method", "images", *map(str, severities)), rows


def choice_table(results: Results) -> Table:
    """Return where the knobs of the first seed stand."""
    rows = [[label(each.method), knob_text(each.method), each.note] for each in results.chosen]
    return ("method", "knob", ""), rows


def agreement_table(results: Results) -> Table:
    """Return how far the paper's steps are from the fast solution."""
    rows = [
        [label(a.method), f"{a.images:,}", f"{a.total_variation:.4f}", f"{a.same:.1%}"]
        for a in results.agreements
    ]
    return ("method", "images", "total variation", "same class"), rows


def timing_table(results: Results) -> Table:
    """Return what one image takes, and how many of SWA's forward passes that is."""
    plain, rows = _seconds(results, methods.MAP_SWA), []
    for method in methods_of(results.study):
        seconds = _seconds(results, method)
        if seconds:
            passes = f"{seconds / plain:,.1f}" if plain else "–"
            rows.append([label(method), duration(seconds), passes])
    return ("method", "time", "forward passes"), rows


def _scored(results: Results) -> list[Method]:
    """Return the methods whose calibration can be told: those with enough images for the bins."""
    study = results.study
    enough = PER_BIN * study.bins
    return [m for m in methods_of(study) if results.level(images_of(m, "", study)) >= enough]


def _common(results: Results, method: Method, shift: str) -> int:
    """Return how many images of a shift a method shares with most others."""
    images = results.study.images.network_wide
    return results.level(min(images, images_of(method, shift, results.study)))


def _seconds(results: Results, method: Method) -> float:
    n = results.level(images_of(method, CLEAN, results.study))
    seconds = results.values(method, "seconds_per_input", CLEAN, n)
    return fmean(seconds) if seconds else 0.0


def _with_error(results: Results, method: Method, score: str, n: int) -> str:
    """Return mean ± std over seeds, or ± the bootstrap's error over images where there is one."""
    values = results.values(method, score, CLEAN, n)
    error = results.errors.get((method.name, score))
    if len(values) != 1 or error is None:
        return shown(values)
    return f"{values[0]:.3f} ± {error:.3f}"


def _words(method: Method) -> tuple[str, str, str, str]:
    return method.rule, method.posterior, method.solver, knob_text(method)
