"""The data folder: whether a data set is there, whole and in which form."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from described import described
from studies.data.catalogue import DataSet, Download
from studies.data.folder import DataError, State, data_folder, inspect, read

from .files import put

ONE, TWO = b"one file", b"another"
PLAIN_ONE = described("set/one", b"one, unzipped")
SET = DataSet(
    "set",
    "for tests",
    (
        Download(described("set/one.gz", ONE, PLAIN_ONE), ("https://nowhere/one.gz",)),
        Download(described("set/two", TWO), ("https://nowhere/two",)),
    ),
)


def test_the_data_folder(monkeypatch):
    monkeypatch.setenv("ACNML_DATA", "/some/where")
    assert data_folder() == Path("/some/where")
    monkeypatch.setenv("ACNML_DATA", "")
    assert data_folder() == Path("data")
    monkeypatch.delenv("ACNML_DATA")
    assert data_folder() == Path("data")


@pytest.mark.parametrize(
    ("files", "state", "flaws"),
    [
        ({}, State.ABSENT, []),
        ({"set/one.gz": ONE, "set/two": TWO}, State.PRESENT, []),
        ({"set/one": b"one, unzipped", "set/two": TWO}, State.PRESENT, []),
        ({"set/one.gz": ONE, "set/two": TWO, "set/two.part": b"x"}, State.PRESENT, []),
        ({"set/two": TWO}, State.INCOMPLETE, ["set/one.gz is missing"]),
        ({"set/two.part": b"ano"}, State.INCOMPLETE, ["set/two is downloaded to 3 of 7 bytes"]),
        (
            {"set/one.gz": ONE[:-1], "set/two": TWO},
            State.CORRUPT,
            ["set/one.gz is corrupt, it has 7 bytes, expected 8"],
        ),
        (
            {"set/one.gz": b"one_file"},
            State.CORRUPT,
            [
                "set/one.gz is corrupt, its md5 is "
                f"{hashlib.md5(b'one_file').hexdigest()}, expected {hashlib.md5(ONE).hexdigest()}",
                "set/two is missing",
            ],
        ),
    ],
)
def test_the_state_of_a_data_set(folder, files, state, flaws):
    for path, content in files.items():
        put(folder, path, content)
    condition = inspect(SET)
    assert condition.state is state
    assert list(condition.flaws) == flaws
    expected = sum(len(content) for path, content in files.items() if not path.endswith(".part"))
    assert condition.size == expected
    assert condition.folder == "set"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "is missing"),
        (TWO[:-1], "is corrupt, it has 6 bytes, expected 7"),
        (TWO.upper(), f"expected {hashlib.md5(TWO).hexdigest()}"),
    ],
)
def test_errors_name_the_file_and_the_command_that_gets_it(folder, content, expected):
    if content is not None:
        put(folder, "set/two", content)
    with pytest.raises(DataError) as error:
        read(SET, SET.files[1])
    assert str(error.value).startswith(f"{folder / 'set/two'} is ")
    assert expected in str(error.value)
    assert "`python -m studies data download set`" in str(error.value)
