"""Randomness and optimisers: an interruption does not show in what comes out."""

from __future__ import annotations

import torch

from tiny_study import Run, contents


def test_global_randomness_depends_on_the_stage_alone(tmp_path):
    state = torch.get_rng_state()
    Run(tmp_path / "first")()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    Run(tmp_path / "second")()
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    for label, tensors in first.items():
        assert all(torch.equal(second[label][name], tensor) for name, tensor in tensors.items())
    noise = next(tensors["noise"] for label, tensors in first.items() if "bma" in label)
    assert len(noise.unique()) == len(noise)  # every block has its own
