"""Bayes by Backprop as a stage that can be stopped after any epoch and resumed."""

from __future__ import annotations

import torch
from torch import nn

import acnml
from acnml import Classifier, Diagonal
from studies.data import Labelled
from studies.store.record import Content
from studies.store.work import mixed
from studies.training.loop import Augment, Keeper
from studies.training.settings import BayesByBackprop


def train_mean_field(
    network: nn.Module,
    data: Labelled,
    augment: Augment,
    settings: BayesByBackprop,
    seed: int,
    keeper: Keeper,
) -> Content:
    """Train a mean-field posterior and return it; its mean starts at the network's weights.

    The fact "std" has the mean standard deviation after every epoch, as a share of the prior's: it
    tells whether the variances were still growing when training ended.
    """
    trainer = acnml.fit.BayesByBackprop(
        Classifier(network),
        len(data.labels),
        settings.prior_std,
        settings.learning_rate,
        settings.learning_rate * settings.variance_rate,
        seed,
    )
    first, std = 0, list[float]()
    if (checkpoint := keeper.resume()) is not None:
        first, std = int(checkpoint.facts["epochs"]), list(checkpoint.facts["std"])
        trainer.load_state_dict(checkpoint.tensors)
    for epoch in range(first, settings.epochs):
        keeper.progress(epoch, settings.epochs)
        generator = torch.Generator().manual_seed(mixed(seed, epoch))
        order = torch.randperm(len(data.labels), generator=generator)
        for rows in order.split(settings.batch_size):
            trainer.step(augment(data.inputs[rows], generator), data.labels[rows])
        std = [*std, mean_std(trainer.posterior()) / settings.prior_std]
        keeper.checkpoint(Content(trainer.state_dict(), {"epochs": epoch + 1, "std": std}))
    return Content.of_saved(trainer.posterior(), {"epochs": settings.epochs, "std": std})


def mean_std(posterior: Diagonal) -> float:
    """Return the mean standard deviation of all parameters."""
    each = torch.cat([variance.flatten() for variance in posterior.var.values()])
    return each.sqrt().mean().item()
