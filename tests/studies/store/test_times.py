"""Times that a stage took, over interruptions, and that it will still take."""

from __future__ import annotations

import pytest
import torch

from studies.store import Stage, work


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(work, "perf_counter", clock)
    return clock


def test_the_time_of_predictions_is_that_of_their_blocks(store, clock):
    dies = True

    def compute(rows: slice) -> dict[str, torch.Tensor]:
        clock.now += 3
        if rows.start == 4 and dies:
            raise KeyboardInterrupt
        return {"p": torch.ones(2)}

    with pytest.raises(KeyboardInterrupt):
        store.predict(Stage("predict"), 8, 2, compute)
    clock.now += 1000  # a pause
    dies = False
    artefact = store.predict(Stage("predict"), 8, 2, compute)
    assert (artefact.seconds, artefact.seconds_per_input) == (12, 1.5)
