"""`acnml …`: the command line.

What it needs beyond the library itself, the extra `experiments`, is imported only when a command
runs, so that a missing package is one clear line and not a traceback.
"""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from typer import Typer

EXTRAS = ("matplotlib", "rich", "scipy", "sklearn", "typer")


def main() -> None:
    """Run the command that the arguments name."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.exit(f"The acnml command needs {names}: pip install 'acnml[experiments]'")
    build_app()()


def build_app() -> "Typer":
    """Return all commands."""
    import typer

    app = typer.Typer(add_completion=False, no_args_is_help=True)

    @app.callback()
    def about() -> None:
        """Classifiers that say when they do not know."""

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo"),
        seed: Annotated[int, typer.Option(min=0, help="Another seed, another network.")] = 0,
    ) -> None:
        """Compare MAP, BMA and ACNML on digits that turn, in under a minute."""
        run_demo(out, seed)

    return app


def run_demo(out: Path, seed: int) -> None:
    """Run the demo, show its table and write its report."""
    require_writable(out)
    from rich.console import Console

    from acnml.experiments.demo import DemoStudy, run
    from acnml.experiments.report import write_report
    from acnml.experiments.summary import closing_sentence
    from acnml.experiments.terminal import ProgressBar, results_table

    console, study = Console(), DemoStudy(seed=seed)
    with ProgressBar(console, study.work) as progress:
        findings = run(study, progress)
        progress.stage("Drawing the report")
        path = write_report(findings, out)
    console.print(results_table(findings))
    console.print(f"Report: {path}", soft_wrap=True, highlight=False)
    console.print(f"\n{closing_sentence(findings)}", highlight=False)


def require_writable(folder: Path) -> None:
    """Make the folder, or end with one line that says why it cannot be written to."""
    probe = folder / ".acnml-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        sys.exit(f"Cannot write to {folder}: {error.strerror}. Choose another folder with --out.")
