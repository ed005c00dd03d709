"""The work of a stage: in one go with checkpoints, or in blocks of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml._util.torch_state import seeded
from studies.store.parts import Parts
from studies.store.record import Content, digest
from studies.store.reporter import Bar

CHECKPOINT = "checkpoint"


class Done(NamedTuple):
    """A result, and the seconds of work in it, without pauses and lost work."""

    content: Content
    seconds: float


@final
class Work:
    """A stage in progress.

    Torch's global random state is seeded from the stage's seed at the beginning and at every
    checkpoint, so that a resumed training draws the same random numbers as an uninterrupted one.
    """

    def __init__(self, parts: Parts, bar: Bar, seed: int) -> None:
        self._parts, self._bar, self._seed = parts, bar, seed
        self._checkpoints, self._before, self._since = 0, 0.0, perf_counter()

    @property
    def seconds(self) -> float:
        """The time of the work so far, including that before the last checkpoint."""
        return self._before + perf_counter() - self._since

    def resume(self) -> Content | None:
        """Return the last checkpoint, or None if there is none."""
        record = self._parts.load(CHECKPOINT)
        if record is None:
            return None
        self._before, self._since = float(record.header["seconds"]), perf_counter()
        self._checkpoints = int(record.header["checkpoints"])
        torch.manual_seed(mixed(self._seed, self._checkpoints))
        return record.content

    def checkpoint(self, content: Content) -> None:
        """Save everything that is needed to continue, replacing the last checkpoint."""
        self._checkpoints += 1
        header = {"seconds": self.seconds, "checkpoints": self._checkpoints}
        self._parts.save(CHECKPOINT, content, header)
        torch.manual_seed(mixed(self._seed, self._checkpoints))

    def progress(self, done: int, total: int) -> None:
        """Move the progress bar."""
        self._bar.progress(done, total)


Make: TypeAlias = Callable[[Work], Content]


def make_in_one_go(function: Make, parts: Parts, bar: Bar, seed: int) -> Done:
    """Run the function of a stage."""
    with seeded(mixed(seed, 0)):
        work = Work(parts, bar, seed)
        content = function(work)
        if not isinstance(content, Content):
            raise TypeError(f"a stage's function must return Content, not {type(content).__name__}")
        return Done(content, work.seconds)


def mixed(seed: int, step: int) -> int:
    """Return a seed for one of many steps, unrelated to the others."""
    return int(digest(f"{seed}", f"{step}")[:15], 16)


# Rows of the inputs -> tensors with a row for each, such as {"log_probs": …, "regret": …}.
Compute: TypeAlias = Callable[[slice], Mapping[str, Tensor]]


def blocks_of(inputs: int, size: int) -> list[slice]:
    """Return the rows 0 … inputs - 1 in blocks.

    >>> blocks_of(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if min(inputs, size) < 1:
        raise ValueError(f"{inputs} inputs in blocks of {size}: both must be at least 1")
    return [slice(start, min(start + size, inputs)) for start in range(0, inputs, size)]


def predict_in_blocks(
    compute: Compute, blocks: list[slice], parts: Parts, bar: Bar, seed: int
) -> Done:
    """Compute the missing blocks, and join all of them."""
    finished = {rows.start: _load(parts, rows) for rows in blocks}
    done = sum(rows.stop - rows.start for rows in blocks if finished[rows.start])
    total = blocks[-1].stop
    bar.progress(done, total)
    for rows in blocks:
        if finished[rows.start] is None:
            block = finished[rows.start] = _compute(compute, rows, seed)
            parts.save(_name(rows), block.content, {"seconds": block.seconds})
            done += rows.stop - rows.start
            bar.progress(done, total)
    return _joined([block for block in finished.values() if block is not None], total)


def _compute(compute: Compute, rows: slice, seed: int) -> Done:
    """Compute one block; its random numbers depend on the block only."""
    since = perf_counter()
    with seeded(mixed(seed, rows.start)):
        # Moving to the CPU is timed too: a GPU computes asynchronously.
        tensors = {name: tensor.detach().cpu() for name, tensor in compute(rows).items()}
    seconds = perf_counter() - since
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or len(tensor) != rows.stop - rows.start:
            raise ValueError(
                f"for inputs {rows.start} to {rows.stop - 1}, {name!r} has the shape "
                f"{tuple(tensor.shape)}; its first dimension must count the inputs"
            )
    return Done(Content(tensors), seconds)


def _load(parts: Parts, rows: slice) -> Done | None:
    record = parts.load(_name(rows))
    return None if record is None else Done(record.content, float(record.header["seconds"]))


def _name(rows: slice) -> str:
    return f"rows-{rows.start:07d}-{rows.stop:07d}"


def _joined(blocks: list[Done], inputs: int) -> Done:
    """Join the blocks in order."""
    names = [sorted(block.content.tensors) for block in blocks]
    if not names[0] or names != names[:1] * len(names):
        raise ValueError(f"every block must have the same tensors, these have {names}")
    tensors = {n: torch.cat([block.content.tensors[n] for block in blocks]) for n in names[0]}
    return Done(Content(tensors, {"inputs": inputs}), sum(block.seconds for block in blocks))
