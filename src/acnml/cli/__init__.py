"""`acnml …`: the command line. Each command lives in a file of its own, as `register(app)`.

The packages of the extra are imported only when a command runs, so that a missing package gives one
clear line instead of a traceback.
"""

import sys
from typing import TYPE_CHECKING

from acnml._util.messages import needed_by

if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """Run the command that the arguments name."""
    if sys.argv[1:] == ["--version"]:  # needs no extra
        from acnml import __version__

        sys.stdout.write(f"acnml {__version__}\n")
        return
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    app()


def build_app() -> "Typer":
    """Return all commands."""
    with needed_by("the command acnml", "acnml[predict]"):
        import typer

        from acnml.cli import merge, monitor, predict

    about = "Calibrated classifiers, from data to answers. acnml --version shows the version."
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=about)
    for command in (predict, merge, monitor):
        command.register(app)
    return app
