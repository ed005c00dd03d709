"""Progress bars neither change what is iterated over nor iterate more than once."""

from __future__ import annotations

import pytest

from acnml._util.progress import track


class Counted:
    """Counts how often an iteration starts, because a DataLoader then starts its workers."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return iter("abc")


@pytest.mark.parametrize("progress", [True, False, None])
def test_an_iteration_is_begun_once(progress):
    items = Counted()
    assert list(track(items, "letters", progress)) == ["a", "b", "c"]
    assert items.begun == 1


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_when_asked_for(progress, shown, capsys):
    list(track("abc", "letters", progress))
    assert ("letters" in capsys.readouterr().err) == shown
