"""A bar in the terminal that is gone when the work is done, and leaves lines behind.

Without a terminal (in a pipe, in CI) there is no bar, only the lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar, final

from rich.console import Console
from rich.progress import Progress, ProgressColumn

T = TypeVar("T", bound="TerminalBar")


class TerminalBar(ABC):
    """What bars share: they begin, they end, and say what was finished unless it failed.

    Args:
        console: where the bar is drawn.
        columns: what it consists of.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        self._bar = Progress(
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
        """Leave a line for what has just been finished."""
