"""Progress neither changes what is iterated over nor iterates more than once, and is logged."""

from __future__ import annotations

import logging
import sys

import pytest

from acnml._util import messages as module
from acnml._util.messages import Lines, track


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


@pytest.fixture
def clock(monkeypatch, caplog):
    """Seconds that pass only when a test says so; the library's log is recorded."""
    caplog.set_level(logging.INFO, "acnml")
    passed = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: passed[0])
    return passed


def test_lines_come_after_5_seconds_and_then_every_30(clock, caplog):
    lines, told = Lines("predict", 2000, done=1000, unit=" rows"), []
    for second in range(1, 101):
        clock[0] = float(second)
        lines.reached(1000 + 8 * second)
        told += [second] * (len(caplog.records) - len(told))
    assert told == [5, 35, 65, 95]
    # The rate is that of this run, 8 rows a second, and 720 rows are left after the second line.
    second = caplog.messages[1]
    assert second == "predict:  64% 1.28k/2.00k [00:35<01:30, 8.00 rows/s]"


def test_iterating_without_a_terminal_is_logged(clock, caplog):
    def slow():
        for item in "abcd":
            clock[0] += 3
            yield item

    assert list(track(slow(), "letters", None, total=4)) == list("abcd")
    assert caplog.messages == ["letters:  25% 1.00/4.00 [00:06<00:18, 6.00s/it]"]


@pytest.mark.parametrize("progress", [True, False])
def test_nothing_is_logged_beside_a_bar_or_if_nothing_was_asked_for(progress, clock, caplog):
    for _ in track("abc", "letters", progress):
        clock[0] += 100
    assert caplog.messages == []


def test_a_terminal_has_a_bar_and_no_lines(clock, caplog, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in track("abc", "letters", None):
        clock[0] += 100
    assert "letters" in capsys.readouterr().err
    assert caplog.messages == []
