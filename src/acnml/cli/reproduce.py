"""`acnml reproduce …`: the paper's studies. A study is a command here and a package of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from acnml.cli import cifar10_c, rotated_mnist
from acnml.cli.folders import require_writable


def register(app: typer.Typer) -> None:
    """Add the command and its studies."""
    studies = typer.Typer(no_args_is_help=True)
    app.add_typer(studies, name="reproduce")

    @studies.callback()
    def reproduce() -> None:
        """Repeat a study of the paper and write its report."""

    @studies.command()
    def toy(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("toy"),
        seed: Annotated[int, typer.Option(min=0, help="Another seed, other points.")] = 0,
    ) -> None:
        """Section 2: exact CNML and CNMAP on points in the plane, in under a minute."""
        run_toy(out, seed)

    @studies.command()
    def theory(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("theory"),
        seed: Annotated[int, typer.Option(min=0, help="Another seed, other data.")] = 0,
    ) -> None:
        """Section 3.3: errors and their bounds as the data grow from 100 to 100,000."""
        run_theory(out, seed)

    rotated_mnist.register(studies)
    cifar10_c.register(studies)


def run_toy(out: Path, seed: int) -> None:
    """Run the toy study, show its table and write its report."""
    require_writable(out)
    from acnml.cli.short import run_short
    from acnml.experiments.toy.report import write_report
    from acnml.experiments.toy.study import ToyStudy, run
    from acnml.experiments.toy.summary import closing_sentence
    from acnml.experiments.toy.terminal import results_table

    study, report = ToyStudy(seed=seed), partial(write_report, folder=out)
    run_short(study, run, report, results_table, closing_sentence)


def run_theory(out: Path, seed: int) -> None:
    """Run the theory study, show its table and write its report."""
    require_writable(out)
    from acnml.cli.short import run_short
    from acnml.experiments.theory.report import write_report
    from acnml.experiments.theory.study import TheoryStudy, run
    from acnml.experiments.theory.summary import closing_sentence
    from acnml.experiments.theory.terminal import results_table

    study, report = TheoryStudy(seed=seed), partial(write_report, folder=out)
    run_short(study, run, report, results_table, closing_sentence)
