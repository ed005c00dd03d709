"""Running a long study: settings, data, all that is not on disk yet, a report, and a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, final

from rich.console import Console

from acnml.cli._shared.files import CannotWriteError, require_writable
from studies.data.folder import DataError
from studies.models import WeightsError
from studies.store import Reporter, SettingError, Store, override, preset
from studies.study.artefacts import Artefacts, Finished, Making


class StudyData(Protocol):
    """The images of a study."""

    @property
    def note(self) -> str:
        """Where they are from."""
        ...


Study = TypeVar("Study")
Data = TypeVar("Data", bound=StudyData)
Results = TypeVar("Results")


@final
@dataclass(frozen=True)
class LongStudy(Generic[Study, Data, Results]):
    """What a study consists of; all but the presets are functions."""

    presets: Mapping[str, Study]
    load_data: Callable[[Study, Path], Data]
    run: Callable[[Study, Data, Artefacts], None]
    collect: Callable[[Study, Data, Artefacts], Results]
    write_report: Callable[[Results, Path], Path]
    headline: Callable[[Results], str]


def run_long(
    parts: LongStudy[Study, Data, Results],
    preset_name: str,
    settings: list[str],
    out: Path,
    report_only: bool,
) -> None:
    """Do what is missing of a study, and write its report."""
    console = Console()
    try:
        study = override(preset(parts.presets, preset_name), settings)
        require_writable(out)
        data = parts.load_data(study, out)
        console.print(data.note, highlight=False, markup=False)
        store = Store(out, study, Reporter(console, out / "run.log"))
        if not report_only:
            parts.run(study, data, Making(store))
        results = parts.collect(study, data, Finished(store))
        path = parts.write_report(results, out)
    except (SettingError, DataError, WeightsError, CannotWriteError, FileNotFoundError) as error:
        sys.exit(str(error))
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)
    console.print(f"\n{parts.headline(results)}", highlight=False)
