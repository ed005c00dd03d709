"""A server for the page, for this machine only."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

# The built page. `make page` copies it here, and wheels of a release have it.
PAGE = Path(__file__).parent / "page"

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
