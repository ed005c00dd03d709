"""SGD with any schedule, in one process or several, from the last checkpoint on.

On a CPU a resumed training ends at the same bits as an uninterrupted one. On a GPU, or with more
than two processes, they agree up to the order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import Classifier, Swag
from acnml._util.torch_state import seeded
from acnml.fit import batch_norm_statistics
from acnml.fit.batches import require_classes
from studies.data import Labelled
from studies.store import Artefact, Content, Stage, Store, Work
from studies.store.work import mixed
from studies.training.processes import Processes
from studies.training.settings import Schedule
from studies.training.state import State, Trained

# Stored inputs and a generator -> what the network takes, augmented where that is wanted.
Augment: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]


class Keeper(Protocol):
    """Keeps checkpoints and shows progress: the `Work` of a stage, or `Nobody`."""

    def resume(self) -> Content | None:
        """Return the last checkpoint, if there is one."""
        ...

    def checkpoint(self, content: Content) -> None:
        """Replace the last checkpoint."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Show progress."""
        ...


@final
class Nobody:
    """Keeps nothing: for processes that do not lead, and for training in memory only."""

    def resume(self) -> Content | None:
        """Return None: there is no checkpoint."""
        return None

    def checkpoint(self, content: Content) -> None:
        """Do nothing."""

    def progress(self, done: int, total: int) -> None:
        """Do nothing."""


@final
@dataclass(frozen=True, eq=False)
class Task:
    """A network, which training changes, and the data it learns from.

    Attributes:
        network: with the weights where training starts.
        data: inputs as they are stored, with labels.
        augment: brings a batch of stored inputs to what the network takes.
    """

    network: nn.Module
    data: Labelled
    augment: Augment

    def __post_init__(self) -> None:
        inputs, labels = self.data
        if not len(labels):
            raise ValueError("there is nothing to train on")
        one = self.augment(inputs[:1], torch.Generator().manual_seed(0))
        require_classes(labels, Classifier(self.network).logits(one))

    def to(self, device: torch.device) -> Task:
        """Move the network and the data to a device."""
        data = Labelled(*(tensor.to(device) for tensor in self.data))
        return Task(self.network.to(device), data, self.augment)


@final
@dataclass(frozen=True, eq=False)
class Batches:
    """One pass over the data; the generator decides the order and the augmentation.

    Attributes:
        task: has the data.
        size: of all batches but the last, which may be smaller.
        generator: on the CPU, so that every device sees the same batches.
    """

    task: Task
    size: int
    generator: torch.Generator

    def __len__(self) -> int:
        return -(-len(self.task.data.labels) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Every process augments whole batches, though it learns from a share of each. This is
        # cheap, and the augmentation does not depend on the number of processes.
        inputs, labels = self.task.data
        order = torch.randperm(len(labels), generator=self.generator)
        for rows in order.to(labels.device).split(self.size):
            yield self.task.augment(inputs[rows], self.generator), labels[rows]


def train(
    task: Task, training: Schedule, seed: int, processes: Processes, keeper: Keeper
) -> Trained | None:
    """Train a network and collect its weights; return None in processes that do not lead.

    Args:
        task: the network, which is changed, and its data.
        training: the schedule.
        seed: of the order of the data, their augmentation and dropout.
        processes: this process among those that train together.
        keeper: of a checkpoint after every epoch; only the leading process uses it.
    """
    processes.require_enough(len(task.data.labels), training.batch_size)
    loop = _Loop(task.to(processes.device), training, seed, processes, keeper)
    loop.run()
    return loop.trained() if processes.leads else None


@final
class _Loop:
    """A training in progress; its arguments are those of `train`."""

    def __init__(
        self, task: Task, training: Schedule, seed: int, processes: Processes, keeper: Keeper
    ) -> None:
        self._task, self._training, self._seed = task, training, seed
        self._processes, self._keeper = processes, keeper
        optimizer = torch.optim.SGD(
            task.network.parameters(),
            lr=training.rate(0),
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        self._state = State(task.network, optimizer, Swag(training.rank))
        if processes.leads and (checkpoint := keeper.resume()) is not None:
            self._state.restore(checkpoint)
        self._state.follow(processes)
        self._model = processes.wrapped(task.network.train())

    def run(self) -> None:
        """Run the epochs that are left."""
        for epoch in range(self._state.epochs, self._training.epochs):
            self._state.note(*self._learn(epoch))
            if self._processes.leads:
                if epoch >= self._training.swa_start:
                    self._state.swag.update(self._task.network)
                self._keeper.checkpoint(self._state.content())

    def trained(self) -> Trained:
        """Return the result, with batch-norm statistics for the averaged weights.

        As in SWAG's code, the statistics are taken over augmented inputs. Unlike there, dropout is
        off, as it is when the average is evaluated.
        """
        last = {name: t.detach().clone() for name, t in self._task.network.state_dict().items()}
        if not self._state.swag.updates:
            return Trained(last, None, {}, self._state.facts)
        swag = self._state.swag
        batches, classifier = self._batches(self._training.epochs), Classifier(self._task.network)
        statistics = batch_norm_statistics(classifier, batches, swag.mean)
        return Trained(last, swag, statistics, self._state.facts)

    def _learn(self, epoch: int) -> tuple[float, float]:
        """Go over the data once; return the mean loss and the accuracy while the weights moved."""
        batches = self._batches(epoch)
        total = torch.zeros(2, dtype=torch.float64, device=self._processes.device)
        # Every process draws its own dropout masks.
        with seeded(mixed(self._epoch_seed(epoch), self._processes.rank)):
            for number, (inputs, labels) in enumerate(batches):
                done = epoch + number / len(batches)
                for group in self._state.optimizer.param_groups:
                    group["lr"] = self._training.rate(done)
                steps = epoch * len(batches) + number
                self._keeper.progress(steps, self._training.epochs * len(batches))
                total += self._step(inputs, labels)
        loss, right = (self._processes.summed(total) / len(self._task.data.labels)).tolist()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} in epoch {epoch}: lower the learning rate")
        return loss, right

    def _step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Learn from a batch; return the sum of the losses and the number of correct predictions.

        The loss is a sum over this process's share, divided by the size of the whole batch. DDP
        averages over processes, which the factor `count` undoes.
        """
        own, optimizer = self._processes.share, self._state.optimizer
        kind = self._processes.device.type
        rounded = kind == "cuda" or self._training.precision == "bfloat16"
        with torch.autocast(kind, torch.bfloat16, enabled=rounded):
            logits = self._model(inputs[own])
            loss = functional.cross_entropy(logits, labels[own], reduction="sum")
        optimizer.zero_grad()
        (loss * (self._processes.count / len(labels))).backward()
        optimizer.step()
        return torch.stack([loss.detach(), (logits.argmax(1) == labels[own]).sum()])

    def _batches(self, epoch: int) -> Batches:
        """Return an epoch's batches: the same in all processes, also after a break."""
        generator = torch.Generator().manual_seed(self._epoch_seed(epoch))
        return Batches(self._task, self._training.batch_size, generator)

    def _epoch_seed(self, epoch: int) -> int:
        return mixed(self._seed, epoch)


def make_together(
    store: Store,
    stage: Stage,
    training: Schedule,
    prepare: Callable[[], Task],
    processes: Processes,
) -> Artefact | None:
    """Return the artefact of a training, made by all processes; None in those that do not lead.

    The store belongs to the leading process. It looks for the artefact and tells the others whether
    there is something to train.

    Args:
        store: used by the leading process alone.
        stage: of this training, with its seed.
        training: the schedule.
        prepare: loads the network and its data, where there is something to train.
        processes: all that train together; each must make the same call.
    """
    if not processes.leads:
        if _leader_says(processes):
            train(prepare(), training, stage.seed, processes, Nobody())
        return None
    asked = False

    def make(work: Work) -> Content:
        nonlocal asked
        asked = _leader_says(processes, something_to_do=True)
        trained = train(prepare(), training, stage.seed, processes, work)
        assert trained is not None  # this process leads
        return trained.content()

    artefact = store.make(stage, make)
    if not asked:
        _leader_says(processes, something_to_do=False)
    return artefact


def _leader_says(processes: Processes, something_to_do: bool = False) -> bool:
    """Return, in all processes, what the leading one says."""
    word = torch.tensor(int(something_to_do), device=processes.device)
    return bool(processes.as_leader(word))
