"""`acnml reproduce cifar10-c`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(studies: typer.Typer) -> None:
    """Add the study."""

    @studies.command(name="cifar10-c")
    def cifar10_c(
        preset: Annotated[str, typer.Option(help="cpu (hours) or paper (a GPU).")] = "cpu",
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("cifar10-c"),
        settings: Annotated[
            list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting.")
        ] = None,
        report_only: Annotated[
            bool, typer.Option("--report-only", help="Report what is finished, and do no more.")
        ] = False,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Show the plan and its cost, and do nothing.")
        ] = False,
    ) -> None:
        """CIFAR-10 as it gets corrupted: calibration, its price, and what the paper says of both.

        A run that was interrupted goes on where it was when the same command is given again.
        """
        if dry_run:
            show_plan(preset, settings or [])
        else:
            run_study(preset, settings or [], out, report_only)


def show_plan(preset_name: str, settings: list[str]) -> None:
    """Show what a run would do; neither data nor networks are touched."""
    from rich.console import Console

    from studies.cifar10_c.plan import plan_table
    from studies.cifar10_c.study import PRESETS
    from studies.store import SettingError, override, preset

    console = Console()
    try:
        study = override(preset(PRESETS, preset_name), settings)
    except SettingError as error:
        sys.exit(str(error))
    console.print(plan_table(study))
    console.print(
        f"At {study.milliseconds:g} ms for a forward pass of one image through {study.model}: not "
        "measured on this machine, --set milliseconds=… changes it.",
        highlight=False,
    )


def run_study(preset_name: str, settings: list[str], out: Path, report_only: bool) -> None:
    """Do what is missing of the study, and write its report."""
    from acnml.cli.long import LongStudy, run_long

    from studies.cifar10_c.data import load_data
    from studies.cifar10_c.report import headline, write_report
    from studies.cifar10_c.results import collect
    from studies.cifar10_c.run import run
    from studies.cifar10_c.study import PRESETS

    parts = LongStudy(
        PRESETS,
        lambda study, out: load_data(study, out / "corruptions"),
        run,
        collect,
        write_report,
        headline,
    )
    run_long(parts, preset_name, settings, out, report_only)
