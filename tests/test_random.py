"""Seeded blocks are reproducible and restore the global random state."""

from __future__ import annotations

import pytest
import torch

from acnml._util.torch_state import seeded


def draw_and_fail() -> None:
    with seeded(3):
        torch.rand(5)
        raise RuntimeError("half-way")


def test_seeded_restores_the_global_state():
    state = torch.get_rng_state()
    with seeded(3):
        first = torch.rand(5)
    with pytest.raises(RuntimeError, match="half-way"):
        draw_and_fail()
    assert torch.equal(state, torch.get_rng_state())
    with seeded(3):
        assert torch.equal(first, torch.rand(5))
    with seeded(4):
        assert not torch.equal(first, torch.rand(5))
