"""Networks and posteriors of one seed: each is a stage, and training is kept after every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from acnml import Classifier
from acnml.cli._shared.digits import Labelled
from studies.rotated_mnist.mean_field import MeanField
from studies.rotated_mnist.study import BayesByBackprop, Descent
from studies.store import Content, Work, restore_training, training_state


@final
@dataclass(frozen=True, eq=False)
class Batches:
    """Training data in batches, in an order that comes from torch's global random state."""

    data: Labelled
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in torch.randperm(len(self.data.labels)).split(self.size):
            yield self.data.images[batch], self.data.labels[batch]


@final
@dataclass(frozen=True, eq=False)
class Learner:
    """Something to train, and how.

    Args:
        module: what learns.
        optimizer: over its parameters.
        loss: images, labels and a generator for noise -> what is to become small.
        rate: share of training that is done, in [0, 1) -> factor of the learning rates.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor, torch.Generator], Tensor]
    rate: Callable[[float], float]


def train_network(
    network: nn.Module, data: Labelled, descent: Descent, seed: int, work: Work
) -> Content:
    """Train a network by SGD."""
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=descent.learning_rate,
        momentum=descent.momentum,
        weight_decay=descent.weight_decay,
    )

    def loss(images: Tensor, labels: Tensor, _: torch.Generator) -> Tensor:
        return nn.functional.cross_entropy(network(images), labels)

    learner = Learner(network.train(), optimizer, loss, cosine)
    learn(learner, data, descent.epochs, descent.batch_size, seed, work)
    return Content(network.state_dict(), {"epochs": descent.epochs})


def train_mean_field(
    network: nn.Module, data: Labelled, settings: BayesByBackprop, seed: int, work: Work
) -> Content:
    """Train a mean-field posterior by Bayes by Backprop."""
    field, rate = MeanField(Classifier(network), settings.prior_std), settings.learning_rate
    groups = [
        {"params": list(field.mean), "lr": rate},
        {"params": list(field.log_var), "lr": rate * settings.variance_rate},
    ]
    optimizer = torch.optim.Adam(groups, fused=True)

    def loss(images: Tensor, labels: Tensor, noise: torch.Generator) -> Tensor:
        return field.loss(images, labels, len(data.labels), noise)

    learner = Learner(field, optimizer, loss, constant)
    learn(learner, data, settings.epochs, settings.batch_size, seed, work)
    return Content.of_posterior(field.posterior(), {"epochs": settings.epochs})


def learn(
    learner: Learner, data: Labelled, epochs: int, batch_size: int, seed: int, work: Work
) -> None:
    """Train in batches whose order the seed decides, from the last checkpoint if there is one."""
    generator = torch.Generator().manual_seed(seed)
    first, rates = 0, [group["lr"] for group in learner.optimizer.param_groups]
    if (checkpoint := work.resume()) is not None:
        first = int(checkpoint.facts["epochs"])
        restore_training(checkpoint.tensors, learner.module, learner.optimizer, generator)
    for epoch in range(first, epochs):
        work.progress(epoch, epochs)
        batches = torch.randperm(len(data.labels), generator=generator).split(batch_size)
        for index, batch in enumerate(batches):
            factor = learner.rate((epoch + index / len(batches)) / epochs)
            for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            learner.optimizer.zero_grad()
            learner.loss(data.images[batch], data.labels[batch], generator).backward()
            learner.optimizer.step()
        state = training_state(learner.module, learner.optimizer, generator)
        work.checkpoint(Content(state, {"epochs": epoch + 1}))


def cosine(done: float) -> float:
    """Fall from 1 to 0 along a cosine."""
    return (1 + math.cos(math.pi * done)) / 2


def constant(_: float) -> float:
    """Stay at 1."""
    return 1.0
