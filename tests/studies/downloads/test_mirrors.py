"""Mirrors that fail, and files that are not the right ones."""

from __future__ import annotations

import errno
import hashlib
import resource

import pytest

from described import described
from studies.data.catalogue import DataSet, Download
from studies.data.download import fetch
from studies.data.folder import DataError, State, inspect
from studies.files import CannotWriteError

from .web_site import CONTENT, Heard, files_below, one_file


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
