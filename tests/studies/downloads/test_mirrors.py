"""Mirrors that fail, and files that are not the right ones."""

from __future__ import annotations

import hashlib

import pytest

from described import described
from studies.data.catalogue import DataSet, Download
from studies.data.download import fetch
from studies.data.folder import DataError, State, inspect

from .web_site import CONTENT, Heard, files_below, one_file


def test_where_one_mirror_fails_the_next_one_serves(site, folder):
    site.files["b"] = CONTENT
    fetch(one_file(site, "a", "b"), Heard())
    assert (folder / "set/file").read_bytes() == CONTENT
    assert site.requests == [("a", 0), ("b", 0)]


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
