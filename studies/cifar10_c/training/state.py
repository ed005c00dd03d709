"""All that training goes on from after an epoch, as tensors and facts: a checkpoint's content.

The order of images, augmentation and dropout are not part of it: every epoch has seeds of its own,
and the generator that a training state has to have says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from acnml import Swag
from acnml._util.params import Params
from studies.cifar10_c.training.processes import Processes
from studies.store import Content, restore_training, training_state
from studies.training.state import below

SWAG = "swag/"
MEAN, SQUARES, DEVIATIONS = (f"{SWAG}{part}/" for part in ("mean", "squares", "deviations"))
UPDATES = f"{SWAG}updates"
MOMENTUM = "momentum_buffer"  # SGD's name for it


@final
@dataclass(eq=False)
class State:
    """A training between two epochs.

    Attributes:
        network: what is trained.
        optimizer: over its parameters.
        swag: the weights collected so far; the first process's only.
        epochs: how many are done.
        losses: the mean training loss of each, while the weights moved.
        accuracies: the share of training images that were right meanwhile.
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
        """Take down that an epoch is done."""
        self.epochs += 1
        self.losses.append(loss)
        self.accuracies.append(accuracy)

    def content(self) -> Content:
        """Return all of it."""
        tensors = training_state(self.network, self.optimizer, torch.Generator())
        return Content({**tensors, **swag_tensors(self.swag)}, self.facts)

    def restore(self, content: Content) -> None:
        """Go back to the state that was kept."""
        restore_training(content.tensors, self.network, self.optimizer, torch.Generator())
        device = next(self.network.parameters()).device
        collected = {n: t.to(device) for n, t in content.tensors.items() if n.startswith(SWAG)}
        restore_swag(self.swag, collected)
        self.epochs = int(content.facts["epochs"])
        self.losses = list(content.facts["losses"])
        self.accuracies = list(content.facts["accuracies"])

    def follow(self, processes: Processes) -> None:
        """Take over the first process's momenta and epochs; weights come with `wrapped`."""
        if processes.count == 1:
            return
        for parameter in self.network.parameters():
            moments = self.optimizer.state[parameter]
            processes.as_leader(moments.setdefault(MOMENTUM, torch.zeros_like(parameter)))
        epochs = torch.tensor(self.epochs, device=processes.device)
        self.epochs = int(processes.as_leader(epochs))


def swag_tensors(swag: Swag) -> Params:
    """Return what a `Swag` has collected; without updates it is its number, 0, alone.

    Its inner sums, because variances would not bring them back to the bit.
    """
    deviations = list(swag._deviations)
    return {
        UPDATES: torch.tensor(swag.updates),
        **{f"{MEAN}{name}": tensor for name, tensor in swag.mean.items()},
        **{f"{SQUARES}{name}": tensor for name, tensor in swag._squares.items()},
        **{f"{DEVIATIONS}{n}": torch.stack([d[n] for d in deviations]) for n in swag.mean},
    }


def restore_swag(swag: Swag, tensors: Params) -> None:
    """Invert `swag_tensors`; tensors of other names are passed over."""
    swag.updates = int(tensors[UPDATES])
    swag.mean, swag._squares = below(MEAN, tensors), below(SQUARES, tensors)
    stacked = below(DEVIATIONS, tensors)
    swag._deviations.clear()
    for row in range(max((len(tensor) for tensor in stacked.values()), default=0)):
        # A clone: a row that is kept would keep all others in memory.
        swag._deviations.append({name: tensor[row].clone() for name, tensor in stacked.items()})
