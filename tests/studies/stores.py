"""A study's store that prints nothing, what its log says was made, and whole runs in a folder."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from studies.engine.results import Results, collect
from studies.engine.run import run
from studies.engine.study import Study, StudyData
from studies.engine.workshop import Finished, Making, Workshop
from studies.store import Reporter, Store

T = TypeVar("T")


def store_in(out: Path, study: object) -> Store:
    return Store(out, study, Reporter(Console(quiet=True), out / "run.log"))


def made(out: Path) -> list[str]:
    """The stages that the log says were made."""
    lines = (out / "run.log").read_text().splitlines()
    return [line.split("  made     ")[1].split("  ")[0] for line in lines if "  made     " in line]


def twice(work: Callable[[Store], T], out: Path, study: object) -> T:
    """Do all the work of a study twice; the second time, all of it is found."""
    work(store_in(out, study))
    first = made(out)
    found = work(store_in(out, study))
    assert made(out) == first != []
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Whole:
    """A study of the engine that has run in a folder."""

    study: Study
    data: StudyData
    out: Path
    results: Results

    @classmethod
    def run(cls, study: Study, out: Path) -> Whole:
        data = study.load(out)
        run(study, data, Making(store_in(out, study.settings)))
        return cls(study, data, out, collected(study, data, out))

    def workshop(self, seed: int = 0) -> Workshop:
        return Workshop(self.study, self.data, finished_in(self.out, self.study.settings), seed)


def finished_in(out: Path, settings: object) -> Finished:
    """What is finished in a folder."""
    return Finished(store_in(out, settings))


def collected(study: Study, data: StudyData, out: Path) -> Results:
    """The results of what is finished in a folder."""
    return collect(study, data, finished_in(out, study.settings))
