"""`acnml monitor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

import acnml
from acnml._util.files import write_file
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
        output: Annotated[Path, typer.Option(help="Folder for the numbers.")],
        window: Annotated[int, typer.Option(min=1, help="Rows of a window.")] = 1000,
        by: Annotated[
            str | None,
            typer.Option(help="Column of --carry: rows in a row with the same value are a window."),
        ] = None,
    ) -> None:
        """Estimate the accuracy of scored rows, window by window, and say if something changed.

        Rows count in the order in which they were scored. Prints a line for every
        window. Writes the same numbers to monitor.json, and monitor.safetensors,
        with which the next run goes on.

        Exit status: 0 if nothing changed, 3 if something did, 1 for an error.
        """
        raise typer.Exit(run_monitor(scored, reference, output, window, by))


def run_monitor(
    scored: Path, reference: Path, output: Path, window: int = 1000, by: str | None = None
) -> int:
    """Watch scored rows, write the report, and return the exit status."""
    own = acnml.load(reference)
    own = own.monitor() if isinstance(own, acnml.Calibrator) else own
    if not isinstance(own, Monitor):
        kind = type(own).__name__
        raise TypeError(f"{reference} holds a {kind}, no monitor: save calibrated.monitor()")
    found = [(name, own.update(_observed(rows))) for name, rows in _windows(scored, window, by)]
    finding = _finding(own, found)
    windows = [{"name": name, **dataclasses.asdict(each)} for name, each in found]
    state = {"level": own.level, "seen": own.seen, "changed_at": own.changed_at}
    text = json.dumps({"finding": finding, **state, "windows": windows})
    # Windows without answers have NaN, which JSON does not have: null.
    plain = json.loads(text, parse_constant=lambda _: None)
    output.mkdir(parents=True, exist_ok=True)
    path = write_file(output / "monitor.json", f"{json.dumps(plain, indent=1)}\n".encode())
    acnml.save(own, output / "monitor.safetensors")
    sys.stdout.write(f"{_table(found)}{finding}\nNumbers: {path}\n")
    return CHANGED if own.changed_at is not None else 0


def _windows(folder: Path, count: int, by: str | None) -> Iterator[tuple[str, pa.Table]]:
    """Yield the windows of a folder with their names."""
    paths = sorted(folder.glob("*.parquet"))  # those of folders below it are of other runs
    if not paths:
        raise ValueError(f"{folder} has no Parquet files: name the output folder of acnml predict")
    columns = [*COLUMNS, *([by] if by else [])]
    tables = [pq.ParquetFile(path).read(columns) for path in paths]
    for path, own in zip(paths, tables, strict=True):
        for name in columns:
            if name not in own.column_names:
                raise ValueError(
                    f"{path} has no column {name!r}: score with a calibrated network, and carry "
                    "the column that windows are made of (--carry)"
                )
    table = pa.concat_tables(tables)
    if by is None:
        starts = np.arange(0, len(table), count)
    else:
        values = np.array(table[by].to_pylist(), dtype=object)
        starts = np.flatnonzero(np.append(len(table) > 0, values[1:] != values[:-1]))
    for start, stop in zip(starts, [*starts[1:], len(table)], strict=False):
        name = f"{start + 1:,} to {stop:,}" if by is None else str(values[start])
        yield name, table.slice(start, stop - start)


def _observed(rows: pa.Table) -> Observed:
    return Observed(*(rows[name].to_numpy().copy() for name in COLUMNS))


def _finding(own: Monitor, found: Sequence[tuple[str, Window]]) -> str:
    """Say whether something has changed, and when."""
    if own.changed_at is None:
        return f"No change was found in {own.seen:,} answers."
    alarm = next((f"window {name}" for name, each in found if each.alarm), "an earlier run")
    where = f"alarm at answer {own.changed_at:,} of {own.seen:,}, in {alarm}"
    return f"Something has changed: {where}."


def _table(found: Sequence[tuple[str, Window]]) -> str:
    """Return a line for every window."""
    width = max([len(name) for name, _ in found] + [len("window")])
    head = f"{'window':{width}}  answers  expected accuracy     abstained  score  evidence\n"
    return head + "".join(
        f"{name:{width}}  {each.count:7,}  {each.accuracy.accuracy:.3f}, "
        f"{each.accuracy.low:.3f} to {each.accuracy.high:.3f}  {each.abstained:9.3f}  "
        f"{each.score:5.2f}  {each.evidence:8.2f}{'  ALARM' if each.alarm else ''}\n"
        for name, each in found
    )
