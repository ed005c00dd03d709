"""`acnml reproduce rotated-mnist`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(studies: typer.Typer) -> None:
    """Add the study."""

    @studies.command(name="rotated-mnist")
    def rotated_mnist(
        preset: Annotated[str, typer.Option(help="quick (ten minutes) or full (hours).")] = "quick",
        seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.")] = None,
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("rotated-mnist"),
        settings: Annotated[
            list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting.")
        ] = None,
        report_only: Annotated[
            bool, typer.Option("--report-only", help="Report what is finished, and do no more.")
        ] = False,
    ) -> None:
        """MNIST as it turns: calibration, its price, and what the paper says of both.

        A run that was interrupted goes on where it was when the same command is given again.
        """
        chosen = [*(settings or []), *([f"seeds={_first(seeds)}"] if seeds else [])]
        run_study(preset, chosen, out, report_only)


def run_study(preset_name: str, settings: list[str], out: Path, report_only: bool) -> None:
    """Do what is missing of the study, and write its report."""
    from acnml.cli.long import LongStudy, run_long

    from studies.rotated_mnist.report import headline, write_report
    from studies.rotated_mnist.results import collect
    from studies.rotated_mnist.run import run
    from studies.rotated_mnist.shifts import load_data
    from studies.rotated_mnist.study import PRESETS

    parts = LongStudy(
        PRESETS, lambda study, _: load_data(study), run, collect, write_report, headline
    )
    run_long(parts, preset_name, settings, out, report_only)


def _first(count: int) -> str:
    return ",".join(map(str, range(count)))
