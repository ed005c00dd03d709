"""Randomness and optimisers: an interruption does not show in what comes out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from studies.files import write_file
from studies.store import Content
from studies.store.record import encode, read_record
from studies.training.state import restore_training, training_state
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


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "adamw, amsgrad": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    def fresh():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        return network, OPTIMIZERS[name](network.parameters())

    def epoch(number, network, optimizer) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(3):
            x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()

    straight, stopped, resumed = fresh(), fresh(), fresh()
    epoch(0, *straight)
    epoch(1, *straight)
    epoch(0, *stopped)
    state = {**training_state(*stopped), "generator": torch.zeros(1)}  # of an older checkpoint
    write_file(tmp_path / "state", encode(Content(state), {})[1])
    epoch(1, *stopped)  # what happens after must not show
    restore_training(read_record(tmp_path / "state").content.tensors, *resumed)
    epoch(1, *resumed)
    expected, found = training_state(*straight), training_state(*resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
