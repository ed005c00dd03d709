"""A web site that breaks connections, a listener to downloads, and a file to download."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from described import described
from studies.data.catalogue import DataSet, Download

CONTENT = bytes(range(256)) * 2000  # 512,000 bytes, half a megabyte


class Site:
    """A web site, and what went on there."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.without_ranges: set[str] = set()
        self.without_length: set[str] = set()
        self.cuts: dict[str, list[int]] = {}  # bytes after which the next connections break
        self.hold = threading.Event()  # what a connection waits for before it breaks
        self.hold.set()
        self.requests: list[tuple[str, int]] = []  # paths, and the bytes they were asked from
        self.address = ""

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.lstrip("/")
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "bytes=0-"))
        start = int(asked[1])
        self.requests.append((path, start))
        content = self.files.get(path)
        if content is None:
            request.send_error(404)
            return
        if path in self.without_ranges:
            start = 0
        if start >= len(content):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            request.send_header("Content-Range", span)
        if path not in self.without_length:
            request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        cuts = self.cuts.get(path, [])
        request.wfile.write(content[start:][: cuts.pop(0) if cuts else None])
        request.wfile.flush()
        self.hold.wait()


class Heard:
    """Hears of a download, and does something when so many bytes are reached."""

    def __init__(self, at: int = sys.maxsize, do: Callable[[], None] = lambda: None) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.bytes = [0]
        self.waited = threading.Event()
        self._at, self._do = at, do

    def begin(self, what: str, size: int, done: int) -> None:
        self.begun.append((what, size, done))

    def reached(self, size: int) -> None:
        self.bytes.append(size)
        if size >= self._at:
            self._do()

    def wait(self) -> None:
        self.waited.set()


def one_file(site: Site, *mirrors: str) -> DataSet:
    """A data set of one file with CONTENT, at these places of the site."""
    addresses = tuple(f"{site.address}/{mirror}" for mirror in mirrors or ("a",))
    return DataSet("set", "for tests", (Download(described("set/file", CONTENT), addresses),))


def files_below(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {".download.lock"}
