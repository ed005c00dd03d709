"""`acnml monitor`."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

import acnml
from acnml._util.files import write_file
from acnml.cli.monitor_page import page
from acnml.cli.options import one_line
from acnml.decisions import Monitor, Observed, Window

COLUMNS = ("label", "confidence", "regret", "score", "abstain")

# Exit status if a change was found.
CHANGED = 3


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @one_line()
    def monitor(
        scored: Annotated[Path, typer.Argument(help="Folder that `acnml predict` wrote.")],
        reference: Annotated[
            Path,
            typer.Option(
                help="File of acnml.save with calibrated.monitor(), or of an earlier run."
            ),
        ],
        output: Annotated[Path, typer.Option(help="Folder for the report.")],
        window: Annotated[int, typer.Option(min=1, help="Rows of a window.")] = 1000,
        by: Annotated[
            str | None,
            typer.Option(help="Column of --carry: rows in a row with the same value are a window."),
        ] = None,
    ) -> None:
        """Estimate the accuracy of scored rows, window by window, and say if something changed.

        Rows count in the order in which they were scored. Writes monitor.html, the
        same numbers in monitor.json, and monitor.safetensors, with which the next
        run goes on.

        Exit status: 0 if nothing changed, 3 if something did, 1 for an error.
        """
        raise typer.Exit(run_monitor(scored, reference, output, window, by))


def run_monitor(
    scored: Path, reference: Path, output: Path, window: int = 1000, by: str | None = None
) -> int:
    """Watch scored rows, write the report, and return the exit status."""
    own = _monitor(reference)
    found = [(name, own.update(_observed(rows))) for name, rows in _windows(scored, window, by)]
    content = _as_json(own, found)
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_without_nan(content), indent=1, allow_nan=False)
    write_file(output / "monitor.json", f"{text}\n".encode())
    path = write_file(output / "monitor.html", page(content).encode())
    acnml.save(own, output / "monitor.safetensors")
    sys.stdout.write(f"{content['finding']}\nReport: {path}\n")
    return CHANGED if own.changed_at is not None else 0


def _monitor(path: Path) -> Monitor:
    """Return the stored monitor, or one of a stored calibrator."""
    try:
        value = acnml.load(path)
    except acnml.storage.StorageError as error:
        hint = "save the monitor: acnml.save(calibrated.monitor(), path)"
        raise ValueError(f"{error}. For --reference, {hint}") from error
    if isinstance(value, acnml.Calibrator):
        return value.monitor()
    if not isinstance(value, Monitor):
        raise TypeError(f"{path} holds a {type(value).__name__}, no monitor")
    return value


def _windows(folder: Path, count: int, by: str | None) -> Iterator[tuple[str, pa.Table]]:
    """Return the windows of a folder by name, one Parquet file after the other."""
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise ValueError(f"{folder} has no Parquet files: give the output folder of acnml predict")
    columns = [*COLUMNS, *([by] if by else [])]
    missing = sorted(set(columns) - set(pq.read_schema(paths[0]).names))
    if missing:
        raise ValueError(
            f"{folder} has no column {missing[0]!r}: score with a calibrated network, and carry "
            "the column that windows are made of (--carry)"
        )
    left: pa.Table | None = None
    done = 0
    for path in paths:
        read = pq.ParquetFile(path).read(columns)
        table = read if left is None else pa.concat_tables([left, read])
        while (end := _end(table, count, by)) < len(table):
            yield _name(table, done, end, by), table.slice(0, end)
            table, done = table.slice(end), done + end
        left = table
    if left is not None and len(left):
        yield _name(left, done, len(left), by), left


def _end(table: pa.Table, count: int, by: str | None) -> int:
    """Return where the first window of a table ends, as far as the table shows."""
    if by is None:
        return count
    values = table[by].to_pylist()
    return next((row for row, value in enumerate(values) if value != values[0]), len(values))


def _name(table: pa.Table, done: int, end: int, by: str | None) -> str:
    return f"{done + 1:,} to {done + end:,}" if by is None else str(table[by][0].as_py())


def _observed(rows: pa.Table) -> Any:
    return Observed(*(rows[name].to_numpy().copy() for name in COLUMNS))


def _as_json(own: Monitor, found: list[tuple[str, Window]]) -> dict[str, Any]:
    """Return everything that the report shows, as plain data."""
    if own.changed_at is None:
        finding = f"No change was found in {own.seen:,} answers."
    else:
        finding = f"Something has changed: alarm at answer {own.changed_at:,} of {own.seen:,}"
        alarm = next((name for name, each in found if each.alarm), None)
        finding += ", in an earlier run." if alarm is None else f", in window {alarm}."
    windows = [{"name": name, **dataclasses.asdict(each)} for name, each in found]
    return {
        "finding": finding,
        "level": own.level,
        "seen": own.seen,
        "changed_at": own.changed_at,
        "windows": windows,
    }


def _without_nan(value: Any) -> Any:
    """Return plain data with None for NaN, which JSON does not have: a window without answers."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
