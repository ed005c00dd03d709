"""`acnml …`: the command line. Each command lives in a file of its own, as `register(app)`.

Packages of extras are imported only when a command runs, so that a missing package gives one clear
line instead of a traceback.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

# What every command needs: the extra that has it, and its packages by the names they are imported
# under. Without a command there is only a help text.
EXTRAS = {
    "": ("demo", ("typer",)),
    "demo": ("demo", ("matplotlib", "rich", "scipy", "sklearn", "typer")),
    "merge": ("predict", ("typer",)),
    "predict": ("predict", ("PIL", "pyarrow", "typer")),
}


def main() -> None:
    """Run the command that the arguments name."""
    if sys.argv[1:] == ["--version"]:  # needs no extra
        _show_version(True)
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    extra, packages = EXTRAS.get(command, EXTRAS[""])
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names, called = ", ".join(missing), f"acnml {command}".strip()
        sys.exit(f"The command {called} needs {names}: pip install 'acnml[{extra}]'")
    build_app()()


def build_app() -> "Typer":
    """Return all commands."""
    from typing import Annotated

    import typer

    from acnml.cli import demo, merge, playground, predict

    app = typer.Typer(add_completion=False, no_args_is_help=True)

    @app.callback()
    def about(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                help="Show the version and exit.",
                callback=_show_version,
                is_eager=True,
            ),
        ] = False,
    ) -> None:
        """Calibrated classifiers by amortized conditional normalized maximum likelihood."""

    for command in (demo, predict, merge, playground):
        command.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from acnml import __version__

        sys.stdout.write(f"acnml {__version__}\n")
        raise SystemExit(0)
