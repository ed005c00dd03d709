"""`python -m studies …`: run a study, train one of its networks, or manage data sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from acnml.cli._shared.files import require_writable
from acnml.cli._shared.terminal import run_short
from studies.data import commands


def build_app() -> typer.Typer:
    """Return all commands."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)

    @app.callback()
    def about() -> None:
        """Reproduce the experiments of the paper and further studies."""

    @app.command()
    def toy(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("toy"),
        seed: Annotated[int, typer.Option(min=0, help="Random seed of the points.")] = 0,
    ) -> None:
        """Section 2: exact CNML and CNMAP on points in the plane, in under a minute."""
        from studies.toy.report import write_report
        from studies.toy.study import ToyStudy, run
        from studies.toy.summary import closing_sentence, results_table

        require_writable(out)
        report = partial(write_report, folder=out)
        run_short(ToyStudy(seed=seed), run, report, results_table, closing_sentence)

    @app.command()
    def theory(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("theory"),
        seed: Annotated[int, typer.Option(min=0, help="Random seed of the data.")] = 0,
    ) -> None:
        """Section 3.3: errors and their bounds as the data grow from 100 to 100,000."""
        from studies.theory.report import write_report
        from studies.theory.study import TheoryStudy, run
        from studies.theory.summary import closing_sentence, results_table

        require_writable(out)
        report = partial(write_report, folder=out)
        run_short(TheoryStudy(seed=seed), run, report, results_table, closing_sentence)

    commands.register(app)
    return app


if __name__ == "__main__":
    build_app()()
