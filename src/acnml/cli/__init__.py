"""`acnml …`: the command line. Each command lives in a file of its own, as `register(app)`.

What it needs beyond the library itself, the extra `experiments`, is imported only when a command
runs, so that a missing package is one clear line and not a traceback.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

EXTRAS = ("PIL", "matplotlib", "rich", "scipy", "sklearn", "typer")


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

    from acnml.cli import data, demo, reproduce

    app = typer.Typer(add_completion=False, no_args_is_help=True)

    @app.callback()
    def about() -> None:
        """Classifiers that say when they do not know."""

    demo.register(app)
    data.register(app)
    reproduce.register(app)
    return app
