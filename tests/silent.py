"""A listener that says nothing, and remembers how much work it was told of."""

from __future__ import annotations


class Silent:
    """Hears the progress of a short study."""

    def __init__(self) -> None:
        self.done = 0

    def stage(self, name: str) -> None:
        pass

    def advance(self, work: int) -> None:
        self.done += work
