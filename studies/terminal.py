"""Progress bars in the terminal, and the frame that runs a short study.

Without a terminal (in a pipe, in CI) there is no bar, only the lines.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar, final

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table

T = TypeVar("T", bound="TerminalBar")


class TerminalBar(ABC):
    """A bar that disappears when the work is done and leaves lines behind.

    Args:
        console: where the bar is drawn.
        columns: what it consists of.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        self._bar = RichProgress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )

    @final
    def __enter__(self: T) -> T:
        self._bar.start()
        return self

    @final
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if error is None:
            self._finish()

    @abstractmethod
    def _finish(self) -> None:
        """Print a line for the work that has just been finished."""


# Short studies ---------------------------------------------------------------------------------


class Progress(Protocol):
    """Receives the progress of a short study."""

    def stage(self, name: str) -> None:
        """Begin a stage."""

    def advance(self, work: int) -> None:
        """Add to the work that is done; the study's `work` is the total."""


@final
class ProgressBar(TerminalBar):
    """One bar over all stages; a finished stage leaves a line with its duration."""

    def __init__(self, console: Console, work: int) -> None:
        super().__init__(
            console,
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._task = self._bar.add_task("", total=work)
        self._stage = ""
        self._since = time.perf_counter()

    def stage(self, name: str) -> None:
        """Begin a stage, and print how long the last one took."""
        self._finish()
        self._stage, self._since = name, time.perf_counter()
        self._bar.update(self._task, description=name)

    def advance(self, work: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, work)

    def _finish(self) -> None:
        if self._stage:
            seconds = time.perf_counter() - self._since
            self._console.print(f"{self._stage:<30} {seconds:5.1f} s", highlight=False)


class ShortStudy(Protocol):
    """The settings of a short study."""

    @property
    def work(self) -> int:
        """The total of the progress bar."""
        ...


Study = TypeVar("Study", bound=ShortStudy)
Findings = TypeVar("Findings")


def run_short(
    study: Study,
    run: Callable[[Study, ProgressBar], Findings],
    write_report: Callable[[Findings], Path],
    results_table: Callable[[Findings], Table],
    closing_text: Callable[[Findings], str],
) -> None:
    """Run a study, print its table and closing paragraphs, and write its report."""
    console = Console()
    with ProgressBar(console, study.work) as progress:
        findings = run(study, progress)
        progress.stage("Drawing the report")
        path = write_report(findings)
    console.print(results_table(findings))
    for paragraph in closing_text(findings).split("\n\n"):
        # One with lines of its own is a table, whose lines are not broken.
        has_lines = "\n" in paragraph
        console.print(f"{paragraph}\n", soft_wrap=has_lines, highlight=False, markup=False)
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside.

    A short study gains little from more threads, and on a busy machine they wait for each other.
    With one thread the numbers do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
