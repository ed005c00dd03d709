"""`python -m playground.server`: serve the built page to this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

PAGE = Path(__file__).parent / "dist"  # built by `make page`

# Some systems have other ideas about these types, and browsers then refuse to run the files.
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}


@final
class PageHandler(SimpleHTTPRequestHandler):
    """Serves files without writing a log."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, **TYPES}  # noqa: RUF012

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def serve(port: int, folder: Path = PAGE) -> ThreadingHTTPServer:
    """Return a server of a folder on the loopback address; port 0 takes a free one."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(PageHandler, directory=str(folder)))


def address(server: ThreadingHTTPServer) -> str:
    """Return where the page is."""
    return f"http://127.0.0.1:{server.server_address[1]}/"


def main() -> None:
    """Serve the page until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m playground.server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="on this machine; 0 takes a free one")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    options = parser.parse_args()
    if not (PAGE / "index.html").exists():
        sys.exit("The page is not built: run `make playground`, which builds and serves it.")
    try:
        server = serve(options.port)
    except OSError as error:
        sys.exit(f"Cannot use port {options.port}: {error.strerror}. Choose another with --port.")
    with server:
        print(f"Playground: {address(server)}  (Ctrl-C ends it)", flush=True)
        if not options.no_browser:
            webbrowser.open(address(server))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
