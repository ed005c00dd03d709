"""`acnml …`: the command line. Each command lives in a file of its own, as `register(app)`.

The packages of the extra are imported only when a command runs, so that a missing package gives one
clear line instead of a traceback.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

# The packages of the extra `predict`, by the names they are imported under.
PACKAGES = ("PIL", "pyarrow", "typer")


def main() -> None:
    """Run the command that the arguments name."""
    if sys.argv[1:] == ["--version"]:  # needs no extra
        _show_version(True)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The command acnml needs {', '.join(missing)}: pip install 'acnml[predict]'")
    build_app()()


def build_app() -> "Typer":
    """Return all commands."""
    from typing import Annotated

    import typer

    from acnml.cli import merge, monitor, predict

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

    predict.register(app)
    merge.register(app)
    monitor.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from acnml import __version__

        sys.stdout.write(f"acnml {__version__}\n")
        raise SystemExit(0)
