"""Running a short study: a progress bar, a table, a report, and a sentence at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from acnml.experiments.study.progress_bar import ProgressBar


class ShortStudy(Protocol):
    """A study's settings, which know how much there is to do."""

    @property
    def work(self) -> int:
        """What the progress bar counts."""
        ...


Study = TypeVar("Study", bound=ShortStudy)
Findings = TypeVar("Findings")


def run_short(
    study: Study,
    run: Callable[[Study, ProgressBar], Findings],
    write_report: Callable[[Findings], Path],
    results_table: Callable[[Findings], Table],
    closing_sentence: Callable[[Findings], str],
) -> None:
    """Run a study, show its table and write its report."""
    console = Console()
    with ProgressBar(console, study.work) as progress:
        findings = run(study, progress)
        progress.stage("Drawing the report")
        path = write_report(findings)
    console.print(results_table(findings))
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)
    console.print(f"\n{closing_sentence(findings)}", highlight=False)
