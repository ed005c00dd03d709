"""SGD with the schedule of SWAG, in one process or several, from the last checkpoint on.

On a CPU an interrupted training ends at the very bits of an uninterrupted one; on a GPU, or with
more than two processes, up to the order in which sums are taken.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from acnml import Classifier, Swag, batch_norm_statistics
from acnml._util.params import Params
from acnml._util.seeding import seeded
from studies.cifar10_c.training.keeper import Keeper
from studies.cifar10_c.training.processes import Processes
from studies.cifar10_c.training.result import Trained
from studies.cifar10_c.training.settings import Training
from studies.cifar10_c.training.state import State
from studies.cifar10_c.training.task import Batches, Task
from studies.store.work import mixed


def train(
    task: Task, training: Training, seed: int, processes: Processes, keeper: Keeper
) -> Trained | None:
    """Train a network as SWAG does; None in processes that do not lead.

    Args:
        task: the network, which is changed, and its images.
        training: the settings.
        seed: of the order of images, their augmentation and dropout.
        processes: this process among those that train together.
        keeper: of a checkpoint after every epoch; the leading process's is asked and told.
    """
    processes.require_enough(len(task.data.labels), training.batch_size)
    loop = _Loop(task.to(processes.device), training, seed, processes, keeper)
    loop.run()
    return loop.trained() if processes.leads else None


@final
class _Loop:
    """A training in hand; its arguments are those of `train`."""

    def __init__(
        self, task: Task, training: Training, seed: int, processes: Processes, keeper: Keeper
    ) -> None:
        self._task, self._training, self._seed = task, training, seed
        self._processes, self._keeper = processes, keeper
        self._state = State(task.network, _sgd(task, training), Swag(training.rank))
        if processes.leads and (checkpoint := keeper.resume()) is not None:
            self._state.restore(checkpoint)
        self._state.follow(processes)
        self._model = processes.wrapped(task.network.train())

    def run(self) -> None:
        """Do the epochs that are left."""
        for epoch in range(self._state.epochs, self._training.epochs):
            self._state.note(*self._learn(epoch))
            if self._processes.leads:
                if epoch >= self._training.swa_start:
                    self._state.swag.update(self._task.network)
                self._keeper.checkpoint(self._state.content())

    def trained(self) -> Trained:
        """Return the result, with batch-norm statistics for the averaged weights."""
        sgd = {name: t.detach().clone() for name, t in self._task.network.state_dict().items()}
        swag = self._state.swag if self._state.swag.updates else None
        statistics = {} if swag is None else self._statistics(swag.mean)
        return Trained(sgd, swag, statistics, self._state.facts)

    def _learn(self, epoch: int) -> tuple[float, float]:
        """Go over the images once; return the mean loss and the accuracy meanwhile."""
        for group in self._state.optimizer.param_groups:
            group["lr"] = self._training.rate(epoch)
        batches, total = self._batches(epoch), _zeros(self._processes.device)
        # Every process draws dropout masks of its own.
        with seeded(mixed(self._epoch_seed(epoch), self._processes.rank)):
            for number, (images, labels) in enumerate(batches, start=epoch * len(batches)):
                self._keeper.progress(number, self._training.epochs * len(batches))
                total += self._step(images, labels)
        loss, right = (self._processes.summed(total) / len(self._task.data.labels)).tolist()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} in epoch {epoch}: lower the learning rate")
        return loss, right

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Learn from a batch; return the sum of the losses and the number of right answers.

        The loss is a sum over this process's share, divided by the size of the whole batch. DDP
        takes the mean over processes, which is undone.
        """
        own, optimizer = self._processes.share, self._state.optimizer
        with self._reduced_precision():
            logits = self._model(images[own])
            loss = functional.cross_entropy(logits, labels[own], reduction="sum")
        optimizer.zero_grad()
        (loss * (self._processes.count / len(labels))).backward()
        optimizer.step()
        return torch.stack([loss.detach(), (logits.argmax(1) == labels[own]).sum()])

    def _statistics(self, mean: Params) -> Params:
        """Return batch norm's statistics at other weights, over augmented images as in SWAG.

        Unlike there, dropout is off, as it is when the average itself is evaluated.
        """
        classifier = Classifier(self._task.network)
        return batch_norm_statistics(classifier, self._batches(self._training.epochs), mean)

    def _batches(self, epoch: int) -> Batches:
        """Return an epoch's batches: the same in all processes, also after a break."""
        generator = torch.Generator().manual_seed(self._epoch_seed(epoch))
        return Batches(self._task, self._training.batch_size, generator)

    def _epoch_seed(self, epoch: int) -> int:
        return mixed(self._seed, epoch)

    def _reduced_precision(self) -> torch.autocast:
        """Compute in bfloat16 where that is faster, on a GPU."""
        kind = self._processes.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def _sgd(task: Task, training: Training) -> torch.optim.SGD:
    return torch.optim.SGD(
        task.network.parameters(),
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


def _zeros(device: torch.device) -> Tensor:
    """Return where losses and right answers are summed up."""
    return torch.zeros(2, dtype=torch.float64, device=device)
