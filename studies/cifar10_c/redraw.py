"""Draw the box plots of finished results again: `python -m studies.cifar10_c.redraw FOLDER`.

Only the folder's `metrics.csv` is read, so this works for results whose artefacts are gone.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from studies.cifar10_c import methods as ms
from studies.cifar10_c.report import all_boxes
from studies.cifar10_c.settings import PRESETS, Cifar10CStudy
from studies.engine.figures import write_figures
from studies.engine.method import Method


def rows_of(method: Method, rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of a method. Its knob can differ between seeds; its name does not."""
    return [row for row in rows if row["name"] == method.name]


def redraw(folder: Path, settings: Cifar10CStudy, inputs: int) -> list[str]:
    """Write the box plots into a folder with results, and return their names."""
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["n"] == str(inputs)]
    group = ms.paper_group(settings)
    by_method = {method: rows_of(method, rows) for method in group}

    def each(method: Method, score: str, shifts: Sequence[str]) -> list[float]:
        values: dict[str, list[float]] = {}  # of all seeds, by shift
        for row in by_method[method]:
            if row["shift"] in shifts:
                values.setdefault(row["shift"], []).append(float(row[score]))
        return [fmean(seeds) for seeds in values.values()]

    drawn = all_boxes(settings, group, each, lambda method: ms.LOOKS[method])
    write_figures(drawn, folder)
    return list(drawn)


def main(
    folder: Annotated[Path, typer.Argument(help="Results with a metrics.csv.")],
    preset: Annotated[str, typer.Option(help="Of the study that was run.")] = "cpu",
    inputs: Annotated[int, typer.Option(help="Images of every corruption.")] = 1000,
) -> None:
    """Draw the box plots of finished results again."""
    print(", ".join(redraw(folder, PRESETS[preset], inputs)))


if __name__ == "__main__":
    typer.run(main)
