"""Downloads from a web site of our own: broken connections, wrong files, mirrors, archives."""

from __future__ import annotations

import errno
import hashlib
import io
import re
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acnml import cli
from acnml.experiments.data import catalogue
from acnml.experiments.data.catalogue import DataFile, DataSet, Download, Study
from acnml.experiments.data.download import fetch
from acnml.experiments.data.folder import DataError, State, inspect
from acnml.experiments.files import CannotWriteError
from acnml.experiments.pipeline.lock import locked

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


def described(path: str, content: bytes) -> DataFile:
    return DataFile(path, len(content), f"md5:{hashlib.md5(content).hexdigest()}")


def one_file(site: Site, *mirrors: str) -> DataSet:
    """A data set of one file with CONTENT, at these places of the site."""
    addresses = tuple(f"{site.address}/{mirror}" for mirror in mirrors or ("a",))
    return DataSet("set", "for tests", (Download(described("set/file", CONTENT), addresses),))


def files_below(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {".download.lock"}


def interrupt() -> None:
    raise KeyboardInterrupt


# One file --------------------------------------------------------------------------------------


def test_a_file_arrives_and_is_not_asked_for_again(site, folder):
    site.files["a"] = CONTENT
    heard = Heard()
    fetch(one_file(site), heard)
    assert (folder / "set/file").read_bytes() == CONTENT
    assert files_below(folder) == {"set/file"}
    assert heard.begun == [("file", len(CONTENT), 0)]
    assert heard.bytes == sorted(heard.bytes)
    assert heard.bytes[-1] == len(CONTENT)
    fetch(one_file(site), Heard())
    assert site.requests == [("a", 0)]


@pytest.mark.parametrize("cuts", [[1], [100_000], [70_000, 1, 300_000]])
def test_a_broken_connection_is_taken_up_where_it_broke(site, folder, cuts):
    site.files["a"], site.cuts["a"] = CONTENT, list(cuts)
    fetch(one_file(site), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    starts = [sum(cuts[:i]) for i in range(len(cuts) + 1)]
    assert site.requests == [("a", start) for start in starts]


def test_an_interrupted_download_goes_on_in_the_next_run(site, folder):
    site.files["a"], site.cuts["a"] = CONTENT, [300_000]
    with pytest.raises(KeyboardInterrupt):
        fetch(one_file(site), Heard(at=200_000, do=interrupt))
    assert files_below(folder) == {"set/file.part"}
    assert inspect(one_file(site)).state is State.INCOMPLETE
    done = (folder / "set/file.part").stat().st_size
    assert 200_000 <= done <= 300_000
    heard = Heard()
    fetch(one_file(site), heard)
    assert (folder / "set/file").read_bytes() == CONTENT
    assert heard.begun == [("file", len(CONTENT), done)]
    assert site.requests == [("a", 0), ("a", done)]


KILLED = """
import sys
from acnml.experiments.data.catalogue import DataFile, DataSet, Download
from acnml.experiments.data.download import fetch
class Silent:
    def begin(self, what, size, done): pass
    def reached(self, size): pass
    def wait(self): pass
_, address, size, checksum = sys.argv
file = DataFile("set/file", int(size), checksum)
fetch(DataSet("set", "for tests", (Download(file, (address,)),)), Silent())
"""


def test_a_killed_download_goes_on_in_the_next_run(site, folder):
    site.files["a"], site.cuts["a"] = CONTENT, [300_000]
    site.hold.clear()
    data_set = one_file(site)
    (download,) = data_set.downloads
    arguments = [*download.mirrors, str(len(CONTENT)), str(download.file.checksum)]
    process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments])
    part = folder / "set/file.part"
    while not (part.is_file() and part.stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    site.hold.set()
    done = part.stat().st_size
    fetch(data_set, Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", 0), ("a", done)]


def test_a_server_without_ranges_sends_the_file_anew(site, folder):
    site.files["a"], site.without_ranges = CONTENT, {"a"}
    (folder / "set").mkdir(parents=True)
    (folder / "set/file.part").write_bytes(CONTENT[:1000])
    fetch(one_file(site), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", 1000)]


def test_a_server_that_does_not_say_how_much_it_sends(site, folder):
    site.files["a"], site.without_length = CONTENT, {"a"}
    fetch(one_file(site), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT


def test_a_connection_that_brings_nothing_is_given_up(site, folder):
    site.files["a"], site.cuts["a"] = CONTENT, [1000, 0]
    with pytest.raises(DataError, match="the connection ended after 1000 of 512000 bytes"):
        fetch(one_file(site), Heard())
    assert files_below(folder) == {"set/file.part"}  # the next run goes on with it


def test_two_downloads_to_one_folder_wait_for_each_other(site, folder):
    site.files["a"] = CONTENT
    folder.mkdir()
    heard = Heard()
    thread = threading.Thread(target=fetch, args=(one_file(site), heard))
    with locked(folder / ".download.lock", on_wait=pytest.fail, on_missing=pytest.fail):
        thread.start()
        assert heard.waited.wait(timeout=20)
        assert site.requests == []
    thread.join()
    assert (folder / "set/file").read_bytes() == CONTENT


# Mirrors and wrong files -----------------------------------------------------------------------


def test_where_one_mirror_fails_the_next_one_serves(site, folder):
    site.files["b"] = CONTENT
    fetch(one_file(site, "a", "b"), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", 0), ("b", 0)]


def test_the_next_mirror_goes_on_where_the_first_one_broke(site, folder):
    site.files |= {"a": CONTENT, "b": CONTENT}
    site.cuts["a"] = [1000, 0]
    fetch(one_file(site, "a", "b"), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", 0), ("a", 1000), ("b", 1000)]


def test_when_all_mirrors_fail_the_error_says_how(site, folder):
    dead = DataSet("set", "", (Download(described("set/file", b"x"), ("http://127.0.0.1:1/a",)),))
    with pytest.raises(DataError, match=r"/set/file could not be downloaded:\n .*refused$"):
        fetch(dead, Heard())
    with pytest.raises(DataError) as error:
        fetch(one_file(site, "a", "b"), Heard())
    lines = str(error.value).splitlines()
    assert lines[1:] == [f"  {site.address}/{name}: HTTP 404, Not Found" for name in "ab"]
    assert files_below(folder) == set()


@pytest.mark.parametrize("quirks", [set(), {"a"}], ids=["ranges", "no ranges"])
def test_a_wrong_checksum_is_an_error_and_leaves_nothing(site, folder, quirks):
    wrong = CONTENT[::-1]
    site.files["a"], site.without_ranges = wrong, quirks
    with pytest.raises(DataError) as error:
        fetch(one_file(site), Heard())
    message = str(error.value)
    assert str(folder / "set/file") in message
    assert f"its md5 is {hashlib.md5(wrong).hexdigest()}" in message
    assert f"expected {hashlib.md5(CONTENT).hexdigest()}" in message
    assert "is kept" not in message
    assert files_below(folder) == set()


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("wrong", [b"<html>sorry</html>", CONTENT[:-1], CONTENT + b"!"])
def test_a_file_of_another_size_gives_way_to_the_next_mirror(site, folder, wrong, says_length):
    site.files |= {"a": wrong, "b": CONTENT}
    site.without_length = set() if says_length else {"a"}
    fetch(one_file(site, "a", "b"), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert files_below(folder) == {"set/file"}
    (folder / "set/file").unlink()
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch(one_file(site, "a"), Heard())
    assert "set/file" not in files_below(folder)


def test_a_page_in_place_of_the_file_does_not_cost_what_has_arrived(site, folder):
    site.files["a"], site.without_ranges = b"<html>Log in first</html>", {"a"}
    (folder / "set").mkdir(parents=True)
    (folder / "set/file.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match=r"offers 25 bytes from 0, expected 512000\nWhat .* kept"):
        fetch(one_file(site), Heard())
    assert (folder / "set/file.part").read_bytes() == CONTENT[:1000]


def test_what_was_begun_wrongly_is_begun_anew(site, folder):
    site.files["a"] = CONTENT
    (folder / "set").mkdir(parents=True)
    for rest in (b"something else", CONTENT[::-1], CONTENT + b"more"):
        (folder / "set/file.part").write_bytes(rest)
        fetch(one_file(site), Heard())
        assert (folder / "set/file").read_bytes() == CONTENT
        assert files_below(folder) == {"set/file"}
        (folder / "set/file").unlink()


def test_a_corrupt_file_is_replaced_and_a_whole_one_is_not(site, folder):
    second = b"another file"
    site.files |= {"a": CONTENT, "b": second}
    downloads = [
        Download(described(path, content), (f"{site.address}/{name}",))
        for path, content, name in [("set/file", CONTENT, "a"), ("set/other", second, "b")]
    ]
    data_set = DataSet("set", "for tests", tuple(downloads))
    (folder / "set").mkdir(parents=True)
    (folder / "set/file").write_bytes(CONTENT[:-1] + b"!")
    (folder / "set/other").write_bytes(second)
    assert inspect(data_set).state is State.CORRUPT
    fetch(data_set, Heard())
    assert inspect(data_set).state is State.PRESENT
    assert site.requests == [("a", 0)]


def test_a_disk_that_is_full_is_not_the_fault_of_the_mirror(site, folder):
    site.files |= {"a": CONTENT, "b": CONTENT}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CannotWriteError, match=r"file\.part") as error:
            fetch(one_file(site, "a", "b"), Heard())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.EFBIG
    assert site.requests == [("a", 0)]


# Archives --------------------------------------------------------------------------------------

MEMBERS = {"set/one": b"1" * 1000, "set/two": b"22" * 1000}


def archive(members: dict[str, bytes], *special: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in special:
            tar.addfile(member)
    return buffer.getvalue()


def packed(site: Site, content: bytes) -> DataSet:
    site.files["pack.tar.gz"] = content
    contents = tuple(described(path, member) for path, member in MEMBERS.items())
    address = f"{site.address}/pack.tar.gz"
    download = Download(described("pack.tar.gz", content), (address,), contents)
    return DataSet("set", "for tests", (download,))


def test_an_archive_is_unpacked_and_removed(site, folder):
    data_set = packed(site, archive({**MEMBERS, "set/readme": b"not wanted"}))
    heard = Heard()
    fetch(data_set, heard)
    assert {path: (folder / path).read_bytes() for path in files_below(folder)} == MEMBERS
    assert heard.begun[1] == ("Unpacking pack.tar.gz", 3000, 0)
    assert heard.bytes[-2:] == [1000, 3000]
    fetch(data_set, Heard())
    assert site.requests == [("pack.tar.gz", 0)]


def test_an_archive_that_is_there_is_not_downloaded(site, folder):
    data_set = packed(site, archive(MEMBERS))
    folder.mkdir()
    (folder / "pack.tar.gz").write_bytes(site.files["pack.tar.gz"])
    fetch(data_set, Heard())
    assert files_below(folder) == set(MEMBERS)
    assert site.requests == []


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def test_an_archive_writes_nowhere_but_where_it_should(site, folder, tmp_path):
    outside = tmp_path / "outside"
    evil = archive({"../outside": b"x", str(outside): b"x", **MEMBERS}, link("set/x", "/etc"))
    fetch(packed(site, evil), Heard())
    assert files_below(folder) == set(MEMBERS)
    assert not outside.exists()
    assert not (folder / "set/x").is_symlink()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (archive({"set/one": MEMBERS["set/one"]}), "lacks set/two"),
        (archive({"set/one": MEMBERS["set/one"]}, link("set/two", "one")), "lacks set/two"),
        (archive({**MEMBERS, "set/two": b"33" * 1000}), "set/two in .* is not the right one"),
    ],
)
def test_an_archive_with_other_files_is_an_error(site, folder, content, expected):
    with pytest.raises(DataError, match=expected):
        fetch(packed(site, content), Heard())
    assert "set/two" not in files_below(folder)


# Command ---------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(cli.build_app(), ["data", *arguments])


@pytest.fixture
def listed(site, monkeypatch):
    """The site's file, as the one data set there is, used by one of two studies."""
    data_set = one_file(site)
    monkeypatch.setattr(catalogue, "CATALOGUE", {"set": data_set})
    studies = (Study("easy", (), "no data"), Study("hard", (data_set,), "a remark"))
    monkeypatch.setattr(catalogue, "STUDIES", studies)
    return data_set


def row(output: str, name: str) -> str:
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [name]]
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("files", "expected", "sentence"),
    [
        ({}, "set absent 512.0 kB set/ for tests", None),
        ({"file": CONTENT}, "set present 512.0 kB set/ for tests", None),
        (
            {"file.part": b"123"},
            "set incomplete 0 bytes set/ for tests",
            "set/file is downloaded to 3 of 512,000 bytes",
        ),
        (
            {"file": b"123"},
            "set corrupt 3 bytes set/ for tests",
            "set/file is corrupt, it has 3 bytes, expected 512000",
        ),
    ],
)
def test_the_command_shows_what_there_is(listed, folder, files, expected, sentence):
    (folder / "set").mkdir(parents=True)
    for name, content in files.items():
        (folder / "set" / name).write_bytes(content)
    result = run()
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Data folder: {folder}\n")
    assert row(result.output, "set") == expected
    assert row(result.output, "easy") == "easy nothing no data"
    assert row(result.output, "hard") == "hard set a remark"
    assert sentence is None or sentence in result.output.splitlines()
    assert ("acnml data download set" in result.output) == ("present" not in expected)
    assert "\x1b" not in result.output  # no terminal, no escape codes


def test_the_command_shows_all_of_the_catalogue(folder):
    result = run()
    assert all(" absent " in row(result.output, name) for name in ("mnist", "notmnist", "frost"))
    assert not folder.exists()  # looking leaves no trace


def test_the_command_downloads(listed, site, folder):
    site.files["a"] = CONTENT
    result = run("download", "set")
    assert result.exit_code == 0, result.output
    assert result.output == f"file (512.0 kB)\nset is complete in {folder}\n"
    assert (folder / "set/file").read_bytes() == CONTENT
    assert run("download", "set").output == f"set is complete in {folder}\n"


def test_the_command_fails_with_a_sentence(listed, site, folder):
    result = run("download", "set")
    assert result.exit_code == 1
    assert result.output.startswith(f"{folder / 'set/file'} could not be downloaded:\n")
    assert "Traceback" not in result.output
    unknown = run("download", "set", "other")
    assert (unknown.exit_code, unknown.output) == (1, "There is no data set other, only set.\n")
    assert run("download").exit_code == 2


def test_a_data_folder_that_cannot_be_made_is_one_line(listed, folder):
    folder.write_text("a file")
    result = run("download", "set")
    assert result.exit_code == 1
    assert result.output.startswith("Cannot write ")
    assert len(result.output.splitlines()) == 1
