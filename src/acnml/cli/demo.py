"""`acnml demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acnml.cli._shared.files import require_writable


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for report.html and overview.png.")] = Path(
            "demo"
        ),
        seed: Annotated[int, typer.Option(min=0, help="Random seed of the first network.")] = 0,
    ) -> None:
        """Calibrate small networks and test them on rotated digits, in about half a minute.

        Trains four networks on scikit-learn's digits and calls acnml.calibrate.
        Compares the plain network, temperature scaling, Bayesian model averaging
        and ACNML on digits rotated by up to 180°. Temperatures, scales and alpha
        are chosen on upright digits. Prints the results and writes a report.
        Nothing is downloaded.
        """
        run_demo(out, seed)


def run_demo(out: Path, seed: int) -> None:
    """Run the demo, print its results and write its report."""
    require_writable(out)
    from rich.console import Console

    from acnml.cli._demo.report import write_report
    from acnml.cli._demo.study import DemoStudy, run
    from acnml.cli._demo.summary import cost_sentence, nll_sentence, verdict
    from acnml.cli._demo.terminal import results_table
    from acnml.cli._shared.terminal import ProgressBar

    study, console = DemoStudy(seed=seed), Console()
    with ProgressBar(console, study.work) as progress:
        findings = run(study, progress)
        progress.stage("Drawing the report")
        path = write_report(findings, out)
    console.print(results_table(findings))
    for sentence in (verdict, nll_sentence, cost_sentence):
        console.print(f"{sentence(findings)}\n", highlight=False)
    console.print("What acnml.calibrate prints for the first network:\n", highlight=False)
    console.print(findings.runs[0].chosen.table, soft_wrap=True, highlight=False, markup=False)
    console.print(f"\nReport: {path}", soft_wrap=True, highlight=False)
