"""The study's numbers as tables: metrics.csv, frontier.csv and detection.csv."""

from __future__ import annotations

from pathlib import Path

from studies.rotated_mnist.methods import Method
from studies.rotated_mnist.results import STUDY, Results
from studies.study.scores import Row
from studies.study.tables import METHOD, METRICS, SCORES, write_csv

FRONTIER = (*METHOD, "value", "validation_nll", "shift", "ece", "nll")
DETECTION = (*METHOD, "seed", "score", "auroc", "fpr95")


def write_tables(results: Results, folder: Path) -> None:
    """Write all tables that have rows."""
    frontier = (
        [*_words(p.family)[:3], p.family.knob, p.value, p.validation_nll, shift, ece, p.nll[shift]]
        for p in results.sweep
        for shift, ece in p.ece.items()
    )
    detection = ([*_words(d.method), d.seed, d.score, d.auroc, d.fpr95] for d in results.detections)
    write_csv(folder / "metrics.csv", METRICS, (metrics_row(row) for row in results.rows))
    write_csv(folder / "frontier.csv", FRONTIER, frontier)
    write_csv(folder / "detection.csv", DETECTION, detection)


def metrics_row(row: Row[Method]) -> list[object]:
    """Return a row of metrics.csv."""
    return [STUDY, *_words(row.method), *(getattr(row, name) for name in SCORES)]


def knob_text(method: Method) -> str:
    """Say where a method's knob stands."""
    return f"{method.knob}={method.value:g}" if method.knob else ""


def _words(method: Method) -> tuple[str, str, str, str]:
    return method.rule, method.posterior, method.solver, knob_text(method)
