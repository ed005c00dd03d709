"""One file over connections that break, processes that die and servers with quirks."""

from __future__ import annotations

import pytest

from studies.data.download import fetch
from studies.data.folder import State, inspect

from .web_site import CONTENT, Heard, files_below, one_file


def interrupt() -> None:
    raise KeyboardInterrupt


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
