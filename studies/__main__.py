"""`python -m studies …`: run a study, train one of its networks, or manage data sets."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from studies.data import commands
from studies.engine.command import (
    EXPECTED,
    STUDIES,
    Settings,
    build,
    command_line,
    register,
    train_network,
)
from studies.engine.study import Kind
from studies.files import require_writable
from studies.settings import override
from studies.settings import preset as choose_preset
from studies.store import Reporter, Store
from studies.terminal import run_short


def kinds() -> dict[str, Kind[Any]]:
    """Return the studies that run on the engine, by name."""
    from studies import cifar10_c, paper_mnist, rotated_mnist

    return {kind.name: kind for kind in (paper_mnist.KIND, rotated_mnist.KIND, cifar10_c.KIND)}


class Stored(NamedTuple):
    """A study that uses only the store of artefacts, not the engine."""

    about: str
    module: str  # has PRESETS and run(study, out, store, command) -> path of the report


def in_one_go() -> dict[str, Stored]:
    """Return the studies that use only the store, by name."""
    return {
        "evidence": Stored(
            "Compare methods of calibration under shift at equal price.", "studies.evidence.report"
        ),
        "text": Stored(
            "Intents of questions to an assistant, and questions that are out of scope.",
            "studies.text",
        ),
        "tabular": Stored(
            "Compare acnml.sklearn with CalibratedClassifierCV on tables, in distribution and "
            "shifted.",
            "studies.tabular",
        ),
        "fidelity": Stored(
            "Compare every approximation with CNML that is retrained to convergence.",
            "studies.fidelity.report",
        ),
        "decisions": Stored(
            "Abstain with a guarantee, estimate the accuracy without labels, and notice a change.",
            "studies.decisions.report",
        ),
        "label-noise": Stored(
            "Find wrong labels: complexities against loss, margin, EL2N, GraNd and self-influence.",
            "studies.label_noise",
        ),
        "if-comp": Stored(
            "Calibration under corruptions by the protocol of IF-COMP: median and quartiles.",
            "studies.if_comp",
        ),
        "linearised": Stored(
            "Posteriors over all layers: the linearised network against the network itself.",
            "studies.linearised",
        ),
        "heads": Stored(
            "Several labels of an image, and the words of a text, at equal price.", "studies.heads"
        ),
    }


def register_stored(app: typer.Typer, name: str, study: Stored) -> None:
    """Add the command of a study; its module is imported when the command runs."""

    def command(
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path(name),
        preset: Annotated[
            str, typer.Option(help="quick, full or another preset of the study.")
        ] = "quick",
        settings: Settings = None,
    ) -> None:
        module = import_module(study.module)
        try:
            require_writable(out)
            chosen = override(choose_preset(module.PRESETS, preset), settings or [])
            console = Console()
            store = Store(out, chosen, Reporter(console, out / "run.log"))
            line = command_line([*STUDIES, name], preset, settings or [])
            path = module.run(chosen, out, store, line)
            console.print(f"Report: {path}", soft_wrap=True, highlight=False)
        except EXPECTED as error:
            sys.exit(str(error))

    again = "Run the same command again to continue an interrupted run."
    app.command(name, help=f"{study.about}\n\n{again}")(command)


class Short(NamedTuple):
    """A study that takes minutes: `studies.NAME` has `study`, `summary` and `report`."""

    about: str
    settings: str  # class of its settings


SHORT = {
    "demo": Short(
        "Calibrate small networks and test them on rotated digits, in about half a minute.",
        "DemoStudy",
    ),
    "toy": Short(
        "Section 2: exact CNML and CNMAP on points in the plane, in a few minutes.", "ToyStudy"
    ),
    "theory": Short(
        "Section 3.2: errors and their bounds as the data grow from 100 to 100,000.", "TheoryStudy"
    ),
}


def register_short(app: typer.Typer, name: str, short: Short) -> None:
    """Add the command of a study; its modules are imported when the command runs."""

    def command(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path(name),
        seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    ) -> None:
        require_writable(out)
        study, summary, report = (
            import_module(f"studies.{name}.{part}") for part in ("study", "summary", "report")
        )
        chosen, write = getattr(study, short.settings)(seed=seed), report.write_report
        table, text = summary.results_table, summary.closing_text
        run_short(chosen, study.run, partial(write, folder=out), table, text)

    app.command(name, help=short.about)(command)


def train(
    study: Annotated[str, typer.Argument(help="Name of a study.")],
    network: Annotated[str, typer.Argument(help="One of its networks, such as SWA.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    preset: Annotated[str | None, typer.Option(help="As for the study.")] = None,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    weights: Annotated[Path | None, typer.Option(help="Write its weights to a file.")] = None,
) -> None:
    """Train one network of a study, in several processes under torchrun.

    For example: torchrun --nproc-per-node 2 -m studies train cifar10-c SWA --preset paper
    --out OUT. The study then finds the network in the folder OUT. Run the same command again to
    continue an interrupted training.
    """
    if study not in kinds():
        sys.exit(f"There is no study {study!r}, only {', '.join(kinds())}.")
    kind = kinds()[study]
    chosen = preset or next(iter(kind.presets))
    train_network(build(kind, chosen, settings or []), network, seed, out, weights)


def build_app() -> typer.Typer:
    """Return all commands."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)

    @app.callback()
    def about() -> None:
        """Reproduce the experiments of the paper and further studies."""

    for name, short in SHORT.items():
        register_short(app, name, short)
    for name, study in in_one_go().items():
        register_stored(app, name, study)
    for kind in kinds().values():
        register(app, kind)
    app.command()(train)
    commands.register(app)
    return app


if __name__ == "__main__":
    build_app()()
