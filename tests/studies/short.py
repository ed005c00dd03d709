"""What tests of short studies share: a silent listener, no trace, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from typer.testing import CliRunner

from studies.__main__ import build_app


class Silent:
    """Hears the progress of a short study, and remembers how much work it was told of."""

    def __init__(self) -> None:
        self.done = 0

    def stage(self, name: str) -> None:
        pass

    def advance(self, work: int) -> None:
        self.done += work


@contextmanager
def no_trace() -> Iterator[None]:
    """Require that torch's random state and threads stay what they are."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def command(*arguments: object) -> str:
    """Return what `python -m studies …` prints."""
    result = CliRunner().invoke(build_app(), [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.output
