"""What a function works with that does a stage in one go: checkpoints and the progress bar."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, TypeAlias, final

import torch

from acnml._util.seeding import seeded
from acnml.experiments.pipeline.parts import Parts
from acnml.experiments.pipeline.plain import digest
from acnml.experiments.pipeline.record import Content
from acnml.experiments.pipeline.reporter import Bar

CHECKPOINT = "checkpoint"


class Done(NamedTuple):
    """What was made, and the seconds of the work in it: without pauses and what a kill has lost."""

    content: Content
    seconds: float


@final
class Work:
    """One stage in hand.

    Torch's global random state is seeded from the stage's seed when the stage begins and anew at
    every checkpoint, so that a resumed training draws what an uninterrupted one draws.
    """

    def __init__(self, parts: Parts, bar: Bar, seed: int) -> None:
        self._parts, self._bar, self._seed = parts, bar, seed
        self._checkpoints, self._before, self._since = 0, 0.0, perf_counter()

    @property
    def seconds(self) -> float:
        """What the work so far has taken, that of the checkpoint it goes on from included."""
        return self._before + perf_counter() - self._since

    def resume(self) -> Content | None:
        """Return the last checkpoint, or None where the work starts at the beginning."""
        record = self._parts.load(CHECKPOINT)
        if record is None:
            return None
        self._before, self._since = float(record.header["seconds"]), perf_counter()
        self._checkpoints = int(record.header["checkpoints"])
        torch.manual_seed(mixed(self._seed, self._checkpoints))
        return record.content

    def checkpoint(self, content: Content) -> None:
        """Keep all that is needed to go on from here, in the place of the checkpoint before."""
        self._checkpoints += 1
        header = {"seconds": self.seconds, "checkpoints": self._checkpoints}
        self._parts.save(CHECKPOINT, content, header)
        torch.manual_seed(mixed(self._seed, self._checkpoints))

    def progress(self, done: int, total: int) -> None:
        """Move the progress bar: so many epochs, batches or images of all."""
        self._bar.progress(done, total)


Make: TypeAlias = Callable[[Work], Content]


def make_in_one_go(function: Make, parts: Parts, bar: Bar, seed: int) -> Done:
    """Let a function do a stage."""
    with seeded(mixed(seed, 0)):
        work = Work(parts, bar, seed)
        content = function(work)
        if not isinstance(content, Content):
            raise TypeError(f"a stage's function must return Content, not {type(content).__name__}")
        return Done(content, work.seconds)


def mixed(seed: int, step: int) -> int:
    """Return a seed for one step of many, unrelated to those of the others."""
    return int(digest(f"{seed}", f"{step}")[:15], 16)
