"""`acnml demo`."""

from __future__ import annotations

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
    from rich.console import Console

    from acnml.experiments.demo.report import write_report
    from acnml.experiments.demo.study import DemoStudy, run
    from acnml.experiments.demo.summary import closing_sentence
    from acnml.experiments.demo.terminal import ProgressBar, results_table

    console, study = Console(), DemoStudy(seed=seed)
    with ProgressBar(console, study.work) as progress:
        findings = run(study, progress)
        progress.stage("Drawing the report")
        path = write_report(findings, out)
    console.print(results_table(findings))
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)
    console.print(f"\n{closing_sentence(findings)}", highlight=False)
