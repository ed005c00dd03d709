"""Numbers as tables: CSV files, and those of the report in Markdown and HTML."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple, TypeVar

from studies.engine.method import Method
from studies.engine.results import ENOUGH, SCORES, Results
from studies.files import write_file
from studies.page import inline
from studies.store import duration

T = TypeVar("T")

METHOD = ("name", "method", "posterior", "solver", "knob")
METRICS = ("study", *METHOD, "seed", "shift", "n", *SCORES)
TIMINGS = ("study", *METHOD, "seed", "shift", "seconds_per_input")
FRONTIER = (*METHOD, "held_out_nll", "shift", "n", "ece", "nll")
DETECTION = (*METHOD, "seed", "score", "auroc", "fpr95")
RELIABILITY = ("name", "shift", "confidence", "accuracy")
TITLES = {
    "ece": "Calibration error (ECE)",
    "brier": "Brier score",
    "accuracy": "Accuracy",
    "nll": "NLL",
}


def counted(count: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "bin"), counted(20, "bin")
    ('1 bin', '20 bins')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


class Table(NamedTuple):
    """A table of the report; in cells `**…**` is strong."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it in Markdown, below its caption."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.caption}\n\n{table}" if self.caption else table

    def html(self) -> str:
        """Return it in HTML."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.head)
        body = "".join(html_row(row[0], row[1:]) for row in self.rows)
        return (
            f'<div class="scroll"><table><caption>{escape(self.caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )


def html_row(head: str, cells: Sequence[str]) -> str:
    """Return a row of a table on a page."""
    columns = "".join(f"<td>{inline(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(head)}</th>{columns}</tr>'


# Rows of results ---------------------------------------------------------------------------------


def select(rows: Sequence[T], /, **wanted: object) -> list[T]:
    """Return the rows whose fields have these values."""
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def mean(rows: Sequence[object], field: str) -> float:
    """Return the mean of a field."""
    return sum(getattr(row, field) for row in rows) / len(rows)


# CSV files -------------------------------------------------------------------------------------


def write_tables(results: Results, folder: Path) -> None:
    """Write metrics.csv, timings.csv and what the study has of the other CSV files.

    Times are in a file of their own: all other numbers are the same for a run that was interrupted.
    """
    study, data = results.study, results.data
    rows = ([study.name, *row.method.words, *row[1:]] for row in results.rows)
    write_csv(folder / "metrics.csv", METRICS, rows)
    times = ([study.name, *timing.method.words, *timing[1:]] for timing in results.timings)
    write_csv(folder / "timings.csv", TIMINGS, times)
    if results.diagrams:
        points = (
            [*place, *point]
            for place, diagram in results.diagrams.items()
            for point in zip(*diagram, strict=True)
        )
        write_csv(folder / "reliability.csv", RELIABILITY, points)
    if study.frontier is not None:
        n = data.count(study.frontier.inputs)
        swept = (
            [*point.method.words, point.held_out_nll, shift, n, ece, point.nll[shift]]
            for point in results.sweep
            for shift, ece in point.ece.items()
        )
        write_csv(folder / "frontier.csv", FRONTIER, swept)
    if study.detection is not None:
        found = ([*each.method.words, *each[1:]] for each in results.detections)
        write_csv(folder / "detection.csv", DETECTION, found)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; numbers keep six digits."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows([f"{c:.6g}" if isinstance(c, float) else c for c in row] for row in rows)
    write_file(path, text.getvalue().encode())


# Tables of the report --------------------------------------------------------------------------


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation over seeds, 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation as text, and a dash where there is nothing.

    Equal values of all seeds are one result, such as that of an ensemble of all, without a spread.

    >>> shown([0.5, 0.7]), shown([0.5, 0.5]), shown([])
    ('0.600 ± 0.141', '0.500', '–')
    """
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if len(set(values)) > 1 else "")


def scored(results: Results) -> list[Method]:
    """Return the methods that see enough inputs for a calibration error."""
    enough = ENOUGH * results.study.bins
    return [m for m in results.study.methods if results.inputs([m]) >= enough]


def scores_table(results: Results, caption: str, shifts: Sequence[str]) -> Table:
    """Return every method's knob, NLL without shift, ECE at some shifts, and time."""
    study, rows = results.study, []
    for method in scored(results):
        ready = [row.method for row in results.rows if row.method.name == method.name]
        if ready:
            seconds = results.seconds(method)
            cells = [shown(results.values(method, "ece", shift)) for shift in shifts]
            rows.append(
                [
                    study.label(method),
                    ready[0].knob_text,
                    f"{results.inputs([method], study.base):,}",
                    shown(results.values(method, "nll", study.base)),
                    *cells,
                    "–" if seconds is None else duration(seconds),
                ]
            )
    eces = (f"ECE {shift}" for shift in shifts)
    head = ("method", "knob, first seed", "inputs", f"NLL {study.base}", *eces, "per input")
    return Table(caption, head, rows)


def choice_table(results: Results, caption: str) -> Table:
    """Return the knobs of the first seed."""
    rows = [[results.study.label(c.method), c.method.knob_text, c.note] for c in results.chosen]
    return Table(caption, ("method", "knob", ""), rows)


def detection_table(results: Results, caption: str) -> Table:
    """Return AUROC and FPR95 of every method and score, the best AUROC first."""
    by_key: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for found in results.detections:
        key = results.study.label(found.method), found.score
        by_key.setdefault(key, []).append((found.auroc, found.fpr95))
    ordered = sorted(by_key.items(), key=lambda item: -statistics.fmean(a for a, _ in item[1]))
    rows = [
        [name, score, *(shown(values) for values in zip(*pairs, strict=True))]
        for (name, score), pairs in ordered
    ]
    return Table(caption, ("method", "score", "AUROC", "FPR95"), rows)


def agreement_table(results: Results, caption: str) -> Table:
    """Return how close the predictions of compared methods are."""
    rows = [
        [
            results.study.label(a.method),
            f"{a.inputs:,}",
            f"{a.total_variation:.4f}",
            f"{a.same:.1%}",
            "–" if a.residual is None else f"{a.residual:.1e}",
        ]
        for a in results.agreements
    ]
    return Table(caption, ("method", "inputs", "total variation", "same class", "residual"), rows)


def timing_table(results: Results, caption: str, more: Iterable[tuple[str, float]] = ()) -> Table:
    """Return the time of one prediction, and in forward passes of the plain network."""
    study, plain = results.study, results.seconds(results.study.plain)
    times = [(study.label(m), s) for m in study.methods if (s := results.seconds(m)) is not None]
    rows = [
        [name, duration(seconds), f"{seconds / plain:,.1f}" if plain else "–"]
        for name, seconds in (*times, *more)
    ]
    return Table(caption, ("method", "time", "forward passes"), rows)
