"""`python -m studies data`: which data sets are present, and how to download the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, final

import typer
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

from studies.data import catalogue
from studies.data.catalogue import DataSet, Study
from studies.data.download import fetch
from studies.data.folder import Condition, DataError, State, data_folder, inspect
from studies.files import CannotWriteError
from studies.terminal import TerminalBar

COLOURS = {
    State.PRESENT: "green",
    State.INCOMPLETE: "yellow",
    State.CORRUPT: "red",
    State.ABSENT: "dim",
}


@final
class DownloadBar(TerminalBar):
    """A bar for the current file; a finished file leaves a line."""

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
        """Start the bar of another file, and print a line for the last one."""
        self._finish()
        self._line = f"{what} ({decimal(size)})"
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=size, completed=done)

    def reached(self, size: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=size)

    def wait(self) -> None:
        """Say that another process is downloading."""
        self._console.print("Waiting for another download to this folder", highlight=False)

    def _finish(self) -> None:
        if self._line:
            self._console.print(self._line, highlight=False)


def data_table(conditions: Mapping[DataSet, Condition]) -> Table:
    """Return the state of every data set; an absent one has the size of its download."""
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


def register(app: typer.Typer) -> None:
    """Add the command and its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    app.add_typer(group, name="data")

    @group.callback()
    def data(context: typer.Context) -> None:
        """Show which data sets are present, and download the missing ones."""
        if context.invoked_subcommand is None:
            show_data()

    @group.command()
    def download(
        names: Annotated[
            list[str], typer.Argument(metavar="NAME", help="See `python -m studies data`.")
        ],
    ) -> None:
        """Download data sets, resume interrupted downloads, and replace corrupt files."""
        download_data(names)

    @group.command()
    def sheet(
        out: Annotated[Path, typer.Option(help="PNG file.")] = Path("corruptions.png"),
    ) -> None:
        """Draw two images of CIFAR-10 under every corruption and severity."""
        draw_sheet(out)


def show_data() -> None:
    """Show the state of every data set, what is wrong with it, and which studies use it."""
    console = Console()
    conditions = {data_set: inspect(data_set) for data_set in catalogue.CATALOGUE.values()}
    console.print(f"Data folder: {data_folder()}", soft_wrap=True, highlight=False, markup=False)
    console.print(data_table(conditions))
    for condition in conditions.values():
        for flaw in condition.flaws:
            console.print(flaw, soft_wrap=True, highlight=False, markup=False)
    console.print(study_table(catalogue.STUDIES, conditions))
    missing = [each.name for each, found in conditions.items() if found.state is not State.PRESENT]
    if missing:
        command = f"python -m studies data download {' '.join(missing)}"
        console.print(f"To get more: {command}", highlight=False, soft_wrap=True)


def draw_sheet(out: Path) -> None:
    """Write the contact sheet of all corruptions, or exit with the reason why not."""
    from studies.corruptions import write_sheet

    try:
        write_sheet(out)
    except (DataError, CannotWriteError) as error:
        sys.exit(str(error))
    typer.echo(f"Sheet: {out}")


def download_data(names: list[str]) -> None:
    """Download data sets, one after the other, or exit with the reason why not."""
    unknown = [name for name in names if name not in catalogue.CATALOGUE]
    if unknown:
        sys.exit(f"There is no data set {unknown[0]}, only {', '.join(catalogue.CATALOGUE)}.")
    console = Console()
    for data_set in (catalogue.CATALOGUE[name] for name in names):
        try:
            with DownloadBar(console) as progress:
                fetch(data_set, progress)
        except (DataError, CannotWriteError) as error:
            sys.exit(str(error))
        done = f"{data_set.name} is complete in {data_folder()}"
        console.print(done, soft_wrap=True, highlight=False, markup=False)
