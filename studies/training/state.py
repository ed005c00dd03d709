"""Checkpoints and results of training as tensors, without pickle.

The order of the data, augmentation and dropout are not part of a checkpoint: every epoch has seeds
of its own. Nor is anything that the settings decide, such as the learning rate of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml import Swag
from studies.store.record import Content
from studies.store.stage import Artefact
from studies.training.processes import Processes

NETWORK, OPTIMIZER = "network/", "optimizer/"
LAST, STATISTICS, SWAG = "last/", "statistics/", "swag/"
MOMENTUM = "momentum_buffer"  # SGD's name for it


def training_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what a training loop resumes from: weights, buffers and moments."""
    moments = {
        f"{OPTIMIZER}{index}/{name}": _tensor(value, name)
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if value is not None  # SGD without momentum
    }
    weights = {f"{NETWORK}{name}": tensor for name, tensor in network.state_dict().items()}
    return {**weights, **moments}


def restore_training(
    tensors: Mapping[str, Tensor], network: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Invert `training_state`; other tensors, which older checkpoints have, are ignored."""
    network.load_state_dict(below(NETWORK, tensors))
    moments: dict[int, dict[str, Tensor]] = {}
    for path, tensor in below(OPTIMIZER, tensors).items():
        index, name = path.split("/")
        moments.setdefault(int(index), {})[name] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have the prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def above(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the prefix before their names."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"the optimizer keeps {name!r} as {type(value).__name__}, not as a tensor")
    return value


@final
@dataclass(eq=False)
class State:
    """A training between two epochs.

    Attributes:
        network: what is trained.
        optimizer: over its parameters.
        swag: the weights collected so far, in the leading process only.
        epochs: number of finished epochs.
        losses: mean training loss of each, while the weights moved.
        accuracies: training accuracy of each, while the weights moved.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    swag: Swag
    epochs: int = 0
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, object]:
        """What was found beside the weights."""
        return {"epochs": self.epochs, "losses": self.losses, "accuracies": self.accuracies}

    def note(self, loss: float, accuracy: float) -> None:
        """Record a finished epoch."""
        self.epochs += 1
        self.losses.append(loss)
        self.accuracies.append(accuracy)

    def content(self) -> Content:
        """Return a checkpoint."""
        tensors = training_state(self.network, self.optimizer)
        return Content({**tensors, **above(SWAG, self.swag.state_dict())}, self.facts)

    def restore(self, content: Content) -> None:
        """Go back to a checkpoint."""
        restore_training(content.tensors, self.network, self.optimizer)
        device = next(self.network.parameters()).device
        collected = {n: t.to(device) for n, t in below(SWAG, content.tensors).items()}
        self.swag.load_state_dict(collected)
        self.epochs = int(content.facts["epochs"])
        self.losses = list(content.facts["losses"])
        self.accuracies = list(content.facts["accuracies"])

    def follow(self, processes: Processes) -> None:
        """Take over the leading process's momenta and epochs; `wrapped` brings the weights."""
        if processes.count == 1:
            return
        for parameter in self.network.parameters():
            moments = self.optimizer.state[parameter]
            processes.as_leader(moments.setdefault(MOMENTUM, torch.zeros_like(parameter)))
        epochs = torch.tensor(self.epochs, device=processes.device)
        self.epochs = int(processes.as_leader(epochs))


@final
@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a training.

    Attributes:
        last: parameters and buffers after the last epoch.
        swag: the collected weights, or None where none were collected.
        statistics: of batch norm at SWAG's mean.
        facts: losses and accuracies of all epochs.
    """

    last: dict[str, Tensor]
    swag: Swag | None
    statistics: dict[str, Tensor]
    facts: Mapping[str, Any]

    @property
    def average(self) -> dict[str, Tensor]:
        """The averaged weights with their batch-norm statistics, for `classifier.at`."""
        return {**self.collected.mean, **self.statistics}

    @property
    def collected(self) -> Swag:
        """The collected weights, where there are some."""
        if self.swag is None:
            raise ValueError("no weights were collected in this training: there is no average")
        return self.swag

    def content(self) -> Content:
        """Return all of it as the content of an artefact."""
        return Content(
            {
                **above(LAST, self.last),
                **above(STATISTICS, self.statistics),
                **above(SWAG, self.swag.state_dict() if self.swag else {}),
            },
            self.facts,
        )


def load_trained(artefact: Artefact) -> Trained:
    """Invert `Trained.content`."""
    tensors = artefact.load()
    swag = None
    if collected := below(SWAG, tensors):
        swag = Swag(int(collected["rank"]))
        swag.load_state_dict(collected)
    return Trained(below(LAST, tensors), swag, below(STATISTICS, tensors), artefact.facts)
