"""Draw figures of finished results again, from their CSV files alone.

    python -m studies.engine.redraw cifar10-c docs/results/cifar10-c --preset cpu

This works for results whose artefacts are gone. Preset and settings are those of the run; `seeds`
are those of the file. Without names, the figures that the folder has are drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from studies.data import Labelled
from studies.engine.choose import SweepPoint
from studies.engine.command import Settings, build
from studies.engine.figures import picture
from studies.engine.method import Method
from studies.engine.report import drawn, sections_of
from studies.engine.results import SCORES, Diagram, Results, Row
from studies.engine.study import Kind, Plan, Study, StudyData
from studies.files import write_file


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def redraw(study: Study, folder: Path, names: Sequence[str] = ()) -> list[str]:
    """Write figures into a folder with results, and return their names."""
    figures = drawn(sections_of(results_in(folder, study)))
    names = [name for name in names or figures if names or (folder / f"{name}.png").is_file()]
    for name in names:
        write_file(folder / f"{name}.png", picture(figures[name]))
    return list(names)


def results_in(folder: Path, study: Study) -> Results:
    """Return what the CSV files of a folder have of the results; the rest is empty."""
    rows = _rows(folder, study)
    return Results(
        study.replaced(seeds=tuple(sorted({row.seed for row in rows})) or study.seeds),
        _counts(study.plan),
        rows=rows,
        timings=(),
        errors={},
        diagrams=_diagrams(folder),
        detections=(),
        agreements=(),
        sweep=_sweep(folder, study),
        chosen=(),
        unsolved=(),
        extras={n: found for n in study.extras if (found := read(folder / f"{n}.csv"))},
        seconds_per_epoch=None,
        missing=(),
    )


def _rows(folder: Path, study: Study) -> tuple[Row, ...]:
    methods = {method.name: method for method in study.methods}
    return tuple(
        Row(
            _set(methods[row["name"]], row["knob"]),
            int(row["seed"]),
            row["shift"],
            int(row["n"]),
            *(float(row[score]) for score in SCORES),
        )
        for row in read(folder / "metrics.csv")
        if row["name"] in methods
    )


def _set(method: Method, knob: str) -> Method:
    """Return a method with what `Method.knob_text` says."""
    told = dict(part.split("=") for part in knob.split(", ") if part)
    value, scale, likelihood = (float(told.get(k, 1)) for k in (method.knob, "scale", "T"))
    return replace(method, value=value, scale=scale, likelihood=likelihood)


def _diagrams(folder: Path) -> dict[tuple[str, str], Diagram]:
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in read(folder / "reliability.csv"):
        pair = float(row["confidence"]), float(row["accuracy"])
        points.setdefault((row["name"], row["shift"]), []).append(pair)
    return {place: Diagram(*zip(*pairs, strict=True)) for place, pairs in points.items()}


def _sweep(folder: Path, study: Study) -> tuple[SweepPoint, ...]:
    if study.frontier is None:
        return ()
    families = {family.family.name: family.family for family in study.frontier.families}
    points: dict[tuple[str, str], SweepPoint] = {}
    for row in read(folder / "frontier.csv"):
        family, knob = families[row["name"]], row["knob"]
        point = SweepPoint(family, _set(family, knob), float(row["held_out_nll"]), {}, {})
        point = points.setdefault((family.name, knob), point)
        # An older file has one row with the mean over the shifts.
        for shift in [row["shift"]] if "shift" in row else study.frontier.shifts:
            point.ece[shift], point.nll[shift] = float(row["ece"]), float(row["nll"])
    return tuple(points.values())


def _counts(plan: Plan) -> StudyData:
    """Return data that have their numbers only."""

    def empty(count: int) -> Labelled:
        return Labelled(torch.empty(0), torch.empty(count, dtype=torch.uint8))

    def load(shift: str, count: int) -> Labelled:
        raise RuntimeError(f"figures are drawn without data, so there is no {shift}")

    train, held_out, test = (empty(count) for count in plan[:3])
    return StudyData("", train, held_out, test, load, "", "")


def main(
    study: Annotated[str, typer.Argument(help="As `python -m studies` calls it.")],
    folder: Annotated[Path, typer.Argument(help="Results with CSV files.")],
    names: Annotated[list[str] | None, typer.Argument(help="Of figures.")] = None,
    preset: Annotated[str | None, typer.Option(help="Of the run.")] = None,
    settings: Settings = None,
) -> None:
    """Draw figures of finished results again."""
    from studies.__main__ import kinds

    kind: Kind[Any] = kinds()[study]
    built = build(kind, preset or next(iter(kind.presets)), settings or [])
    print(", ".join(redraw(built, folder, names or ())))


if __name__ == "__main__":
    typer.run(main)
