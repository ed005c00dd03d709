"""`acnml demo`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from acnml.cli._shared.files import require_writable


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo"),
        seed: Annotated[int, typer.Option(min=0, help="Random seed of the network.")] = 0,
    ) -> None:
        """Compare MAP, BMA and ACNML on rotated digits, in under a minute."""
        run_demo(out, seed)


def run_demo(out: Path, seed: int) -> None:
    """Run the demo, print its table and write its report."""
    require_writable(out)
    from acnml.cli._demo.report import write_report
    from acnml.cli._demo.study import DemoStudy, run
    from acnml.cli._demo.summary import closing_sentence
    from acnml.cli._demo.terminal import results_table
    from acnml.cli._shared.terminal import run_short

    study, report = DemoStudy(seed=seed), partial(write_report, folder=out)
    run_short(study, run, report, results_table, closing_sentence)
