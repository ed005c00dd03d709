"""The command of a study: settings, data, everything that is not on disk yet, and the report."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import typer
from rich.console import Console

from studies.data.folder import DataError
from studies.engine.report import headline, write_report
from studies.engine.results import collect
from studies.engine.run import plan_table, run
from studies.engine.study import Kind, Study
from studies.engine.workshop import Finished, Making, Workshop
from studies.files import CannotWriteError, require_writable, write_file
from studies.models import WeightsError
from studies.settings import SettingError, override, preset
from studies.store import Reporter, Store
from studies.training import joined, make_together

EXPECTED = (SettingError, DataError, WeightsError, CannotWriteError, FileNotFoundError)
RESUMING = "Run the same command again to continue an interrupted run."
STUDIES = ("python", "-m", "studies")
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting.")
]


def command_line(program: Sequence[str], preset: str, settings: Sequence[str]) -> str:
    """Return the command that runs a study again; the folder is left out.

    >>> command_line([*STUDIES, "text"], "quick", ["seeds=0,1", "heads=a b"])
    "python -m studies text --preset quick --set seeds=0,1 --set 'heads=a b'"
    """
    changed = [word for setting in settings for word in ("--set", setting)]
    return shlex.join([*program, "--preset", preset, *changed])


def register(app: typer.Typer, kind: Kind[Any], program: Sequence[str] = ()) -> None:
    """Add the command of a study; `program` is what runs it, by default `python -m studies`."""
    names = ", ".join(kind.presets)
    default = next(iter(kind.presets))

    def command(
        preset: Annotated[str, typer.Option(help=f"One of {names}.")] = default,
        seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds.")] = None,
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path(kind.name),
        settings: Settings = None,
        report_only: Annotated[
            bool, typer.Option("--report-only", help="Report what is finished, and stop.")
        ] = False,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Show the plan with its counts, and stop.")
        ] = False,
    ) -> None:
        first = [f"seeds={','.join(map(str, range(seeds)))}"] if seeds else []
        study = build(kind, preset, [*(settings or []), *first], program)
        if dry_run:
            show_plan(study)
        else:
            run_study(study, out, report_only)

    command.__doc__ = f"{kind.about}\n\n{RESUMING}"
    app.command(name=kind.name)(command)


def main(kind: Kind[Any]) -> None:
    """Run one study as a program of its own: the last line of a study that is one file."""
    app = typer.Typer(add_completion=False)
    register(app, kind, ["python", Path(sys.argv[0]).name])
    app()


def build(
    kind: Kind[Any], preset_name: str, settings: list[str], program: Sequence[str] = ()
) -> Study:
    """Return the study of a preset with some settings changed, or exit with what is wrong."""
    try:
        study = kind.build(override(preset(kind.presets, preset_name), settings))
    except EXPECTED as error:
        sys.exit(str(error))
    command = command_line(program or [*STUDIES, kind.name], preset_name, settings)
    return study.replaced(command=command)


def show_plan(study: Study) -> None:
    """Show what a run would do; neither data nor networks are touched."""
    console = Console()
    console.print(plan_table(study))
    if study.plan.note:
        console.print(study.plan.note, highlight=False)


def run_study(study: Study, out: Path, report_only: bool) -> None:
    """Do what is missing of a study, and write its report."""
    console = Console()
    try:
        require_writable(out)
        data = study.load(out)
        console.print(data.note, highlight=False, markup=False)
        store = Store(out, study.settings, Reporter(console, out / "run.log"))
        if not report_only:
            run(study, data, Making(store))
        results = collect(study, data, Finished(store))
        path = write_report(results, out)
    except EXPECTED as error:
        sys.exit(str(error))
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)
    console.print(f"\n{headline(results)}", highlight=False)


def train_network(
    study: Study, network: str, seed: int, out: Path, weights: Path | None = None
) -> None:
    """Train one network of a study, in as many processes as `torchrun` has started.

    If `weights` is given, the weights that the study takes are written to this file.
    """
    trainable = [name for name, each in study.networks.items() if each.training is not None]
    if network not in trainable:
        sys.exit(f"There is no network {network!r} to train, only {', '.join(trainable)}.")
    training = study.networks[network].training
    assert training is not None
    try:
        data = study.load(out)
        with joined() as processes:
            quiet = Console(quiet=not processes.leads)
            store = Store(out, study.settings, Reporter(quiet, out / "run.log"))
            workshop = Workshop(study, data, Making(store), seed)
            stage = workshop.training_stage(network)
            make_together(store, stage, training, lambda: workshop.task(network), processes)
            if weights is not None and processes.leads:
                write_file(weights, safetensors.torch.save(workshop.weights(network).load()))
    except EXPECTED as error:
        sys.exit(str(error))
