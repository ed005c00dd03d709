"""What the short studies share, those that run in one go: who hears of progress, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Progress(Protocol):
    """Hears what a study is doing and how far it is."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def advance(self, work: int) -> None:
        """So much more of the study's `work` is done."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside.

    So small a study gains little from more, which on a busy machine wait for each other for
    minutes; and the numbers do not depend on how many cores there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
