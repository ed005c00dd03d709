"""`python -m studies …`: run a study, train one of its networks, or manage data sets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from acnml.cli._shared.files import require_writable
from acnml.cli._shared.terminal import run_short
from studies.data import commands
from studies.engine.command import EXPECTED, Settings, build, register, train_network
from studies.engine.study import Kind
from studies.settings import override
from studies.settings import preset as choose_preset
from studies.store import Reporter, Store


def kinds() -> dict[str, Kind[Any]]:
    """Return the studies that run on the engine, by name."""
    from studies import cifar10_c, paper_mnist, rotated_mnist

    return {kind.name: kind for kind in (paper_mnist.KIND, rotated_mnist.KIND, cifar10_c.KIND)}


def run_with_store(
    presets: Mapping[str, Any],
    run: Callable[[Any, Path, Store], Path],
    preset: str,
    settings: list[str],
    out: Path,
) -> None:
    """Run a study that uses only the store of artefacts, and say where its report is."""
    try:
        require_writable(out)
        study = override(choose_preset(presets, preset), settings)
        console = Console()
        store = Store(out, study, Reporter(console, out / "run.log"))
        console.print(f"Report: {run(study, out, store)}", soft_wrap=True, highlight=False)
    except EXPECTED as error:
        sys.exit(str(error))


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
        """Section 3.2: errors and their bounds as the data grow from 100 to 100,000."""
        from studies.theory.report import write_report
        from studies.theory.study import TheoryStudy, run
        from studies.theory.summary import closing_sentence, results_table

        require_writable(out)
        report = partial(write_report, folder=out)
        run_short(TheoryStudy(seed=seed), run, report, results_table, closing_sentence)

    @app.command()
    def evidence(
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("evidence"),
        preset: Annotated[str, typer.Option(help="quick or full.")] = "quick",
        settings: Settings = None,
    ) -> None:
        """Compare methods of calibration under shift at equal price.

        Run the same command again to continue an interrupted run.
        """
        from studies.evidence.report import write_pages
        from studies.evidence.settings import PRESETS
        from studies.evidence.study import collect

        def run(study: Any, out: Path, store: Store) -> Path:
            return write_pages(study, collect(study, out, store), out)

        run_with_store(PRESETS, run, preset, settings or [], out)

    @app.command()
    def text(
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("text"),
        preset: Annotated[str, typer.Option(help="quick or full.")] = "quick",
        settings: Settings = None,
    ) -> None:
        """Intents of questions to an assistant, and questions that are out of scope.

        Run the same command again to continue an interrupted run.
        """
        from studies import text

        run_with_store(text.PRESETS, text.run, preset, settings or [], out)

    @app.command()
    def tabular(
        out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("tabular"),
        preset: Annotated[str, typer.Option(help="quick or full.")] = "quick",
        settings: Settings = None,
    ) -> None:
        """Compare acnml.sklearn with CalibratedClassifierCV on tables, in distribution and shifted.

        Run the same command again to continue an interrupted run.
        """
        from studies import tabular

        run_with_store(tabular.PRESETS, tabular.run, preset, settings or [], out)

    for kind in kinds().values():
        register(app, kind)

    @app.command()
    def train(
        study: Annotated[str, typer.Argument(help="Name of a study.")],
        network: Annotated[str, typer.Argument(help="One of its networks, such as SWA.")],
        out: Annotated[Path, typer.Option(help="Folder of the study.")],
        preset: Annotated[str | None, typer.Option(help="As for the study.")] = None,
        settings: Settings = None,
        seed: Annotated[int, typer.Option(min=0)] = 0,
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
        train_network(build(kind, chosen, settings or []), network, seed, out)

    @app.command()
    def compare(
        metrics: Annotated[Path, typer.Argument(help="A study's metrics.csv.")],
        ours: Annotated[str, typer.Argument(help="METHOD/POSTERIOR/SOLVER/KNOB.")],
        others: Annotated[list[str], typer.Argument(help="The same, one or more.")],
        shifts: Annotated[list[str], typer.Option(help="Regular expression; a group of shifts.")],
        inputs: Annotated[int, typer.Option(help="Inputs of every shift.")] = 1000,
        score: Annotated[list[str] | None, typer.Option(help="By default ECE, Brier, NLL.")] = None,
    ) -> None:
        """Compare methods of finished results: mean scores, and at how many shifts ours is lower.

        For example: compare docs/results/cifar10-c/metrics.csv ACNML/SWAG-D/linearised/alpha=2
        MAP/SWA --shifts ' 5$'
        """
        from studies.engine.compare import as_markdown
        from studies.engine.compare import compare as compared

        scores = score or ["ece", "brier", "nll"]
        try:
            print(as_markdown(list(compared(metrics, ours, others, shifts, inputs, scores))))
        except EXPECTED as error:
            sys.exit(str(error))

    commands.register(app)
    return app


if __name__ == "__main__":
    build_app()()
