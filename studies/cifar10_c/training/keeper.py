"""Who keeps checkpoints and hears of progress: a pipeline's `Work`, or nobody."""

from __future__ import annotations

from typing import Protocol, final

from studies.store import Content


class Keeper(Protocol):
    """Keeps checkpoints and hears of progress."""

    def resume(self) -> Content | None:
        """Return the last checkpoint, if there is one."""
        ...

    def checkpoint(self, content: Content) -> None:
        """Keep a checkpoint in the place of the one before."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Hear how far the work has come."""
        ...


@final
class Nobody:
    """Keeps nothing: for processes that do not lead, and for training in memory alone."""

    def resume(self) -> Content | None:
        """Return None: there is no checkpoint."""
        return None

    def checkpoint(self, content: Content) -> None:
        """Let it go."""

    def progress(self, done: int, total: int) -> None:
        """Hear it, and do nothing."""
