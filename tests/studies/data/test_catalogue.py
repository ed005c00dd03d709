"""The catalogue is well formed, and describes the files at hand."""

from __future__ import annotations

import pytest
from typer.main import get_command

from studies.__main__ import build_app
from studies.data.catalogue import CATALOGUE, STUDIES
from studies.data.folder import State, inspect

DIGEST_LENGTHS = {"md5": 32, "sha1": 40, "sha256": 64}


@pytest.mark.parametrize("data_set", CATALOGUE.values(), ids=CATALOGUE)
def test_an_entry_is_well_formed(data_set):
    files = [form for file in data_set.files for form in (file, *file.alternatives)]
    files += [download.file for download in data_set.downloads]
    for file in files:
        algorithm, _, digest = (file.checksum or "").partition(":")
        assert len(digest) == DIGEST_LENGTHS.get(algorithm, 0)
        assert set(digest) <= set("0123456789abcdef")
        assert file.size > 0
        assert not file.path.startswith("/")
        assert ".." not in file.path.split("/")
    for download in data_set.downloads:
        assert download.file.checksum, "what is downloaded has a checksum"
        assert len(set(download.mirrors)) == len(download.mirrors) >= 2
        for address in download.mirrors:
            assert address.startswith("https://")
            assert address.endswith(f"/{download.file.name}")


def test_no_two_files_have_the_same_place():
    files = [file for each in CATALOGUE.values() for file in each.files]
    paths = [form.path for file in files for form in (file, *file.alternatives)]
    assert len(set(paths)) == len(paths)


def test_every_study_says_what_data_it_uses():
    commands = {command.name for command in get_command(build_app()).commands.values()}
    named = {study.name for study in STUDIES}
    assert named == commands - {"train", "data"}


@pytest.mark.parametrize("data_set", CATALOGUE.values(), ids=CATALOGUE)
def test_the_files_at_hand_are_those_of_the_catalogue(data_set):
    condition = inspect(data_set)
    if condition.state in (State.ABSENT, State.INCOMPLETE):
        pytest.skip(f"{data_set.name} is not in the data folder")
    assert condition.flaws == ()
    assert condition.state is State.PRESENT
