"""A progress bar in the terminal, while a short study works."""

from __future__ import annotations

import time
from typing import final

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn

from acnml.experiments.terminal_bar import TerminalBar


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
        """Begin a stage, and say how long the last one took."""
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
