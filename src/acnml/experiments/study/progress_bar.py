"""A progress bar in the terminal, while a short study works.

Without a terminal (in a pipe, in CI) there is no bar, only a line for every finished stage.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


@final
class ProgressBar:
    """One bar over all stages; a finished stage leaves a line with its duration."""

    def __init__(self, console: Console, work: int) -> None:
        columns = (
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=work)
        self._console = console
        self._stage = ""
        self._since = time.perf_counter()

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if error is None:
            self._finish_stage()

    def stage(self, name: str) -> None:
        """Begin a stage, and say how long the last one took."""
        self._finish_stage()
        self._stage, self._since = name, time.perf_counter()
        self._bar.update(self._task, description=name)

    def advance(self, work: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, work)

    def _finish_stage(self) -> None:
        if self._stage:
            seconds = time.perf_counter() - self._since
            self._console.print(f"{self._stage:<30} {seconds:5.1f} s", highlight=False)
