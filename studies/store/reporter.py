"""Progress of a run: a bar, a line for every stage, and the file run.log.

In a terminal the current stage has a bar with the remaining time; elsewhere (a pipe, CI) there are
only lines. The log has every line with the time and the process id, so that two runs in one folder
can be distinguished.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from studies.files import writing


@final
class Bar:
    """The progress bar of one stage."""

    def __init__(self, console: Console, title: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        # Blocks may take minutes each: the speed is the average over all of them.
        self.rich = Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=math.inf,
        )
        self._task = self.rich.add_task(title, total=None)

    def progress(self, done: int, total: int) -> None:
        """Show progress; the first call sets the start and does not count for the speed."""
        self.rich.update(self._task, completed=done, total=total)


@final
class Reporter:
    """Writes to the terminal and the log.

    Args:
        console: where lines and bars go.
        log: the file that lines are added to.
    """

    def __init__(self, console: Console, log: Path) -> None:
        self._console, self._log = console, log

    def tell(self, event: str, subject: str, detail: str = "") -> None:
        """Write a line to the console and the log."""
        self._console.print(
            _line(event, subject, detail), highlight=False, markup=False, soft_wrap=True
        )
        self.note(event, subject, detail)

    def note(self, event: str, subject: str, detail: str = "") -> None:
        """Write a line to the log alone."""
        now = datetime.now().isoformat(" ", "seconds")
        line = f"{now}  {os.getpid():>7}  {_line(event, subject, detail)}\n"
        with writing(self._log):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            # One write to the end of the file, so that the lines of two runs do not mix.
            with self._log.open("ab", buffering=0) as file:
                file.write(line.encode())

    @contextmanager
    def stage(self, title: str) -> Iterator[Bar]:
        """Show a bar inside, and log an error that ends the stage."""
        self.note("begun", title)
        bar = Bar(self._console, title)
        try:
            with bar.rich:
                yield bar
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            with suppress(OSError):  # the first error is the one to report
                self.note("stopped", title, reason)
            raise


def duration(seconds: float) -> str:
    """Return a duration in readable units.

    >>> [duration(seconds) for seconds in (0.0123, 1.5, 75, 7300)]
    ['12.3 ms', '1.5 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _line(event: str, subject: str, detail: str) -> str:
    return f"{event:<8} {subject:<40} {detail}".rstrip()
