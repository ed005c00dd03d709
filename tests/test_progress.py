"""Progress neither changes what is iterated over nor iterates more than once, and is logged."""

from __future__ import annotations

import logging
import sys

import pytest

from acnml._util import messages as module
from acnml._util.messages import track


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
    told = []

    def slow():
        for second in range(1, 101):
            clock[0] = float(second)
            yield second

    for second in track(slow(), "parts", None, total=1000):
        told += [second] * (len(caplog.records) - len(told))
    assert told == [5, 35, 65, 95]
    assert caplog.messages[1] == "parts:   3% 34/1000 [00:35<16:34,  1.03s/it]"


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
