"""`acnml data`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command and what it can do."""
    group = typer.Typer(invoke_without_command=True)
    app.add_typer(group, name="data")

    @group.callback()
    def data(context: typer.Context) -> None:
        """Show which data sets are here, and download those that are not."""
        if context.invoked_subcommand is None:
            show_data()

    @group.command()
    def download(
        names: Annotated[list[str], typer.Argument(metavar="NAME", help="See `acnml data`.")],
    ) -> None:
        """Download data sets, go on with what was interrupted, and replace what is corrupt."""
        download_data(names)

    @group.command()
    def sheet(
        out: Annotated[Path, typer.Option(help="PNG file.")] = Path("corruptions.png"),
    ) -> None:
        """Draw two images of CIFAR-10 under every corruption and severity, to be looked at."""
        draw_sheet(out)


def show_data() -> None:
    """Show what there is of every data set, what is wrong with it, and who needs it."""
    from rich.console import Console

    from acnml.experiments.data.catalogue import CATALOGUE, STUDIES
    from acnml.experiments.data.folder import State, data_folder, inspect
    from acnml.experiments.data.terminal import data_table, study_table

    console = Console()
    conditions = {data_set: inspect(data_set) for data_set in CATALOGUE.values()}
    console.print(f"Data folder: {data_folder()}", soft_wrap=True, highlight=False, markup=False)
    console.print(data_table(conditions))
    for condition in conditions.values():
        for flaw in condition.flaws:
            console.print(flaw, soft_wrap=True, highlight=False, markup=False)
    console.print(study_table(STUDIES, conditions))
    wanting = [each.name for each, found in conditions.items() if found.state is not State.PRESENT]
    if wanting:
        console.print(f"To get more: acnml data download {' '.join(wanting)}", highlight=False)


def draw_sheet(out: Path) -> None:
    """Write the contact sheet of all corruptions, or end with a sentence that says why not."""
    from acnml.experiments.data.corruptions import write_sheet
    from acnml.experiments.data.folder import DataError
    from acnml.experiments.files import CannotWriteError

    try:
        write_sheet(out)
    except (DataError, CannotWriteError) as error:
        sys.exit(str(error))
    typer.echo(f"Sheet: {out}")


def download_data(names: list[str]) -> None:
    """Download data sets, one after the other, or end with a sentence that says why not."""
    from rich.console import Console

    from acnml.experiments.data.catalogue import CATALOGUE
    from acnml.experiments.data.download import fetch
    from acnml.experiments.data.folder import DataError, data_folder
    from acnml.experiments.data.terminal import DownloadBar
    from acnml.experiments.files import CannotWriteError

    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        sys.exit(f"There is no data set {unknown[0]}, only {', '.join(CATALOGUE)}.")
    console = Console()
    for data_set in (CATALOGUE[name] for name in names):
        try:
            with DownloadBar(console) as progress:
                fetch(data_set, progress)
        except (DataError, CannotWriteError) as error:
            sys.exit(str(error))
        done = f"{data_set.name} is complete in {data_folder()}"
        console.print(done, soft_wrap=True, highlight=False, markup=False)
