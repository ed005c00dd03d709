"""The study's numbers as tables: metrics.csv, frontier.csv and detection.csv."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from acnml.experiments.files import write_file
from acnml.experiments.rotated_mnist.methods import Method
from acnml.experiments.rotated_mnist.results import STUDY, Results, Row

METHOD = ("method", "posterior", "solver", "knob")
SCORES = ("seed", "shift", "n", "accuracy", "nll", "brier", "ece", "seconds_per_input")
METRICS = ("study", *METHOD, *SCORES)
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


def metrics_row(row: Row) -> list[object]:
    """Return a row of metrics.csv."""
    return [STUDY, *_words(row.method), *row[1:]]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; numbers keep six digits."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows([f"{c:.6g}" if isinstance(c, float) else c for c in row] for row in rows)
    write_file(path, text.getvalue().encode())


def knob_text(method: Method) -> str:
    """Say where a method's knob stands."""
    return f"{method.knob}={method.value:g}" if method.knob else ""


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation over seeds, 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± std as text, and a dash where there is nothing."""
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:.{digits}f} ± {std:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def _words(method: Method) -> tuple[str, str, str, str]:
    return method.rule, method.posterior, method.solver, knob_text(method)
