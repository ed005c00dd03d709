"""A training loop as tensors, so that a checkpoint needs no pickle.

What settings decide (the learning rate of an epoch, say) is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acnml._util.params import Params

NETWORK, OPTIMIZER, GENERATOR = "network/", "optimizer/", "generator"


def training_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> Params:
    """Return all that a training loop goes on from: weights and buffers, moments, random state."""
    moments = {
        f"{OPTIMIZER}{index}/{name}": _tensor(value, name)
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if value is not None  # SGD without momentum
    }
    weights = {f"{NETWORK}{name}": tensor for name, tensor in network.state_dict().items()}
    return {**weights, **moments, GENERATOR: generator.get_state()}


def restore_training(
    tensors: Mapping[str, Tensor],
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """Put the network, its optimizer and the generator into the state that was kept."""
    network.load_state_dict(below(NETWORK, tensors))
    moments: dict[int, dict[str, Tensor]] = {}
    for path, tensor in below(OPTIMIZER, tensors).items():
        index, name = path.split("/")
        moments.setdefault(int(index), {})[name] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    generator.set_state(tensors[GENERATOR])


def below(prefix: str, tensors: Mapping[str, Tensor]) -> Params:
    """Return the tensors whose names begin so, without the beginning."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"the optimizer keeps {name!r} as {type(value).__name__}, not as a tensor")
    return value
