"""`acnml demo`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from acnml.cli.folders import require_writable


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo"),
        seed: Annotated[int, typer.Option(min=0, help="Another seed, another network.")] = 0,
    ) -> None:
        """Compare MAP, BMA and ACNML on digits that turn, in under a minute."""
        run_demo(out, seed)


def run_demo(out: Path, seed: int) -> None:
    """Run the demo, show its table and write its report."""
    require_writable(out)
    from acnml.cli.short import run_short
    from acnml.experiments.demo.report import write_report
    from acnml.experiments.demo.study import DemoStudy, run
    from acnml.experiments.demo.summary import closing_sentence
    from acnml.experiments.demo.terminal import results_table

    study, report = DemoStudy(seed=seed), partial(write_report, folder=out)
    run_short(study, run, report, results_table, closing_sentence)
