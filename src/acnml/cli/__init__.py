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
        from acnml import __version__

        sys.stdout.write(f"acnml {__version__}\n")
        return
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The command acnml needs {', '.join(missing)}: pip install 'acnml[predict]'")
    build_app()()


def build_app() -> "Typer":
    """Return all commands."""
    import typer

    from acnml.cli import merge, monitor, predict

    about = "Calibrated classifiers, from data to answers. acnml --version shows the version."
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=about)
    for command in (predict, merge, monitor):
        command.register(app)
    return app
