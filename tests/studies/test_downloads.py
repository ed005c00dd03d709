"""Downloads: connections that break, mirrors that fail, wrong files, archives, and the command."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from described import described
from short import command
from studies.data import catalogue
from studies.data.catalogue import DataSet, Download, Study
from studies.data.download import fetch
from studies.data.folder import DataError, State, inspect

CONTENT = bytes(range(256)) * 2000  # 512,000 bytes, half a megabyte


class Site:
    """A web site that breaks connections, and what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.has_ranges = True
        self.cuts: list[int] = []  # bytes after which the next connections break
        self.requests: list[tuple[str, int]] = []  # paths, and the bytes they were asked from
        self.address = ""

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.lstrip("/")
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "bytes=0-"))
        self.requests.append((path, int(asked[1])))
        if path not in self.files:
            request.send_error(404)
            return
        start, content = int(asked[1]) if self.has_ranges else 0, self.files[path]
        request.send_response(206 if start else 200)
        if start:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            request.send_header("Content-Range", span)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        request.wfile.write(content[start:][: self.cuts.pop(0) if self.cuts else None])


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
    server.shutdown()
    thread.join()
    server.server_close()


class Heard:
    """Hears of a download, and breaks it off when so many bytes are reached."""

    def __init__(self, breaks_at: int = sys.maxsize) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.breaks_at = breaks_at

    def begin(self, what: str, size: int, done: int) -> None:
        self.begun.append((what, size, done))

    def reached(self, size: int) -> None:
        if size >= self.breaks_at:
            raise KeyboardInterrupt

    def wait(self) -> None:
        raise AssertionError("no other process downloads")


def one_file(site: Site, *mirrors: str) -> DataSet:
    """A data set of one file with CONTENT, at these places of the site."""
    addresses = tuple(f"{site.address}/{mirror}" for mirror in mirrors or ("a",))
    return DataSet("set", "for tests", (Download(described("set/file", CONTENT), addresses),))


def files_below(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {".download.lock"}


def test_a_file_arrives_and_is_not_asked_for_again(site, folder):
    site.files["a"], heard = CONTENT, Heard()
    fetch(one_file(site), heard)
    assert (folder / "set/file").read_bytes() == CONTENT
    assert files_below(folder) == {"set/file"}
    assert heard.begun == [("file", len(CONTENT), 0)]
    fetch(one_file(site), Heard())
    assert site.requests == [("a", 0)]


@pytest.mark.parametrize("cuts", [[1], [70_000, 1, 300_000]])
def test_a_broken_connection_is_taken_up_where_it_broke(site, folder, cuts):
    site.files["a"], site.cuts = CONTENT, list(cuts)
    fetch(one_file(site), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", sum(cuts[:i])) for i in range(len(cuts) + 1)]


def test_an_interrupted_download_goes_on_in_the_next_run(site, folder):
    site.files["a"], site.cuts, heard = CONTENT, [300_000], Heard()
    with pytest.raises(KeyboardInterrupt):
        fetch(one_file(site), Heard(breaks_at=200_000))
    assert files_below(folder) == {"set/file.part"}
    assert inspect(one_file(site)).state is State.INCOMPLETE
    done = (folder / "set/file.part").stat().st_size
    assert 200_000 <= done <= 300_000
    fetch(one_file(site), heard)
    assert (folder / "set/file").read_bytes() == CONTENT
    assert heard.begun == [("file", len(CONTENT), done)]
    assert site.requests == [("a", 0), ("a", done)]


def test_where_one_mirror_fails_the_next_one_serves(site, folder):
    site.files["b"] = CONTENT
    fetch(one_file(site, "a", "b"), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_wrong_checksum_is_an_error_and_leaves_nothing(site, folder, has_ranges):
    site.files["a"], site.has_ranges = CONTENT[::-1], has_ranges
    with pytest.raises(DataError) as error:
        fetch(one_file(site), Heard())
    found, wanted = (hashlib.md5(content).hexdigest() for content in (CONTENT[::-1], CONTENT))
    assert str(folder / "set/file") in str(error.value)
    assert f"its md5 is {found}, expected {wanted}" in str(error.value)
    assert files_below(folder) == set()


def test_a_corrupt_file_is_replaced_and_a_whole_one_is_not(site, folder):
    site.files |= {"a": CONTENT, "b": b"another file"}
    downloads = [
        Download(described(path, site.files[name]), (f"{site.address}/{name}",))
        for path, name in (("set/file", "a"), ("set/other", "b"))
    ]
    data_set = DataSet("set", "for tests", tuple(downloads))
    (folder / "set").mkdir(parents=True)
    (folder / "set/file").write_bytes(CONTENT[:-1] + b"!")
    (folder / "set/other").write_bytes(site.files["b"])
    assert inspect(data_set).state is State.CORRUPT
    fetch(data_set, Heard())
    assert inspect(data_set).state is State.PRESENT
    assert site.requests == [("a", 0)]


def test_an_archive_writes_nowhere_but_where_it_should(site, folder, tmp_path):
    """What the catalogue lists is unpacked and the archive removed; links and other paths are not.

    Then nothing is asked for again.
    """
    wanted, outside = {"set/one": b"1" * 1000, "set/two": b"22" * 1000}, tmp_path / "outside"
    evil = {"set/readme": b"x", "../outside": b"x", str(outside): b"x", **wanted}
    buffer, heard = io.BytesIO(), Heard()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in evil.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("set/x")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    site.files["pack.tar.gz"] = buffer.getvalue()
    contents = tuple(described(path, member) for path, member in wanted.items())
    file = described("pack.tar.gz", buffer.getvalue())
    download = Download(file, (f"{site.address}/pack.tar.gz",), contents)
    for _ in range(2):
        fetch(DataSet("set", "for tests", (download,)), heard)
    assert {path: (folder / path).read_bytes() for path in files_below(folder)} == wanted
    assert not outside.exists()
    assert not (folder / "set/x").is_symlink()
    assert heard.begun[1] == ("Unpacking pack.tar.gz", 3000, 0)
    assert site.requests == [("pack.tar.gz", 0)]


def test_the_command_shows_what_there_is_and_downloads(site, folder, monkeypatch):
    def row(name: str) -> str:
        (line,) = [line for line in command("data").splitlines() if line.split()[:1] == [name]]
        return " ".join(line.split())

    data_set = one_file(site)
    site.files["a"] = CONTENT
    monkeypatch.setattr(catalogue, "CATALOGUE", {"set": data_set})
    studies = (Study("easy", (), "no data"), Study("hard", (data_set,), "a remark"))
    monkeypatch.setattr(catalogue, "STUDIES", studies)
    assert row("set") == "set absent 512.0 kB set/ for tests"
    assert row("easy") == "easy nothing no data"
    assert row("hard") == "hard set a remark"
    assert "python -m studies data download set" in command("data")
    (folder / "set").mkdir(parents=True)
    (folder / "set/file").write_bytes(b"123")
    assert row("set") == "set corrupt 3 bytes set/ for tests"
    assert "set/file is corrupt, it has 3 bytes, expected 512000" in command("data").splitlines()
    complete = f"set is complete in {folder}\n"
    assert command("data", "download", "set") == f"file (512.0 kB)\n{complete}"
    assert row("set") == "set present 512.0 kB set/ for tests"
    assert command("data", "download", "set") == complete
