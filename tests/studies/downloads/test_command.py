"""The command that shows data sets and downloads them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from studies.__main__ import build_app
from studies.data import catalogue
from studies.data.catalogue import Study

from .web_site import CONTENT, one_file


def run(*arguments: str):
    return CliRunner().invoke(build_app(), ["data", *arguments])


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
    assert ("python -m studies data download set" in result.output) == ("present" not in expected)
    assert "\x1b" not in result.output  # no terminal, no escape codes


def test_the_command_downloads(listed, site, folder):
    site.files["a"] = CONTENT
    result = run("download", "set")
    assert result.exit_code == 0, result.output
    assert result.output == f"file (512.0 kB)\nset is complete in {folder}\n"
    assert (folder / "set/file").read_bytes() == CONTENT
    assert run("download", "set").output == f"set is complete in {folder}\n"
