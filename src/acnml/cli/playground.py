"""`acnml playground`."""

from __future__ import annotations

import sys
import webbrowser
from typing import Annotated

import typer

from acnml.cli._playground.server import PAGE, address, serve


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def playground(
        port: Annotated[
            int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")
        ] = 0,
        browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    ) -> None:
        """Draw digits in the browser, and see what three methods say about them.

        Serves the playground's page to this machine until Ctrl-C. The page runs a
        small network and ACNML by itself: nothing is downloaded or sent anywhere.
        """
        run_playground(port, browser)


def run_playground(port: int, browser: bool) -> None:
    """Serve the page until it is interrupted."""
    if not (PAGE / "index.html").exists():
        sys.exit(
            "This installation has no built page. In a clone of the repository, run "
            "`make playground`, which builds and serves it; it needs Node.js 20.19, 22.12 or "
            "newer, and npm."
        )
    try:
        server = serve(port)
    except OSError as error:
        sys.exit(f"Cannot use port {port}: {error.strerror}. Choose another one with --port.")
    with server:
        print(f"Playground: {address(server)}  (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(address(server))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
