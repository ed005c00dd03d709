"""The web site, and the data folder that it is downloaded to."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .web_site import Site


@pytest.fixture
def site():
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.serve(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}"
    yield site
    site.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "data"
