"""What `acnml data` shows in a terminal: tables of what there is, and a bar while it downloads.

Without a terminal (in a pipe, in CI) there is no bar, only a line for every file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from acnml.experiments.data.catalogue import DataSet, Study
from acnml.experiments.data.folder import Condition, State
from acnml.experiments.terminal_bar import TerminalBar

COLOURS = {
    State.PRESENT: "green",
    State.INCOMPLETE: "yellow",
    State.CORRUPT: "red",
    State.ABSENT: "dim",
}


@final
class DownloadBar(TerminalBar):
    """A bar for the file under way; a finished file leaves a line."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console,
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._task = self._bar.add_task("", visible=False)
        self._line = ""

    def begin(self, what: str, size: int, done: int) -> None:
        """Show the bar of another file, and leave a line for the last."""
        self._finish()
        self._line = f"{what} ({decimal(size)})"
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=size, completed=done)

    def reached(self, size: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=size)

    def wait(self) -> None:
        """Say what is waited for."""
        self._console.print("Waiting for another download to this folder", highlight=False)

    def _finish(self) -> None:
        if self._line:
            self._console.print(self._line, highlight=False)


def data_table(conditions: Mapping[DataSet, Condition]) -> Table:
    """Return what there is of every data set; the size of an absent one is that to download."""
    table = _table("data set", "state", "size", "folder", "what it is")
    for data_set, condition in conditions.items():
        absent = condition.state is State.ABSENT
        table.add_row(
            data_set.name,
            _coloured(condition.state, condition.state.value),
            decimal(data_set.download_size if absent else condition.size),
            f"{condition.folder}/",
            data_set.about,
        )
    return table


def study_table(studies: Iterable[Study], conditions: Mapping[DataSet, Condition]) -> Table:
    """Return which data sets every study uses, in the colours of their states."""
    table = _table("study", "uses", "")
    for study in studies:
        uses = ", ".join(_coloured(conditions[each].state, each.name) for each in study.uses)
        table.add_row(study.name, uses or "nothing", study.remark)
    return table


def _coloured(state: State, text: str) -> str:
    return f"[{COLOURS[state]}]{text}[/]"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column == "size" else "left")
    return table
