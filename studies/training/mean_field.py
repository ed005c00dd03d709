"""Bayes by Backprop as a stage that can be stopped after any epoch and resumed.

The objective is that of `acnml.fit_bayes_by_backprop`; the variances have their own learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn

from acnml import Classifier, Diagonal
from acnml._engine.layers import AFFINE, find_sites
from acnml.cli._shared.digits import Labelled
from acnml.fitting.bayes_by_backprop import INITIAL_STD, local_reparameterised
from studies.store.record import Content
from studies.training.loop import Augment, Keeper
from studies.training.settings import BayesByBackprop
from studies.training.state import restore_training, training_state


def train_mean_field(
    network: nn.Module,
    data: Labelled,
    augment: Augment,
    settings: BayesByBackprop,
    seed: int,
    keeper: Keeper,
) -> Content:
    """Train a mean-field posterior and return it; its mean starts at the network's weights."""
    field, rate = MeanField(Classifier(network), settings.prior_std), settings.learning_rate
    groups = [
        {"params": list(field.mean), "lr": rate},
        {"params": list(field.log_var), "lr": rate * settings.variance_rate},
    ]
    optimizer, generator = torch.optim.Adam(groups, fused=True), torch.Generator()
    generator.manual_seed(seed)
    first = 0
    if (checkpoint := keeper.resume()) is not None:
        first = int(checkpoint.facts["epochs"])
        restore_training(checkpoint.tensors, field, optimizer, generator)
    for epoch in range(first, settings.epochs):
        keeper.progress(epoch, settings.epochs)
        order = torch.randperm(len(data.labels), generator=generator)
        for rows in order.split(settings.batch_size):
            inputs = augment(data.inputs[rows], generator)
            optimizer.zero_grad()
            field.loss(inputs, data.labels[rows], len(data.labels), generator).backward()
            optimizer.step()
        state = training_state(field, optimizer, generator)
        keeper.checkpoint(Content(state, {"epochs": epoch + 1}))
    return Content.of_posterior(field.posterior(), {"epochs": settings.epochs})


@final
class MeanField(nn.Module):
    """N(μ, diag(s)) over all weights of a network, with the negative evidence bound as its loss.

    Args:
        classifier: the network; its weights are where μ starts.
        prior_std: σ₀ of the prior N(0, σ₀² I).
    """

    def __init__(self, classifier: Classifier, prior_std: float) -> None:
        super().__init__()
        start = classifier.copy_parameters(list(classifier.parameters))
        self._classifier, self._names, self._prior_var = classifier, list(start), prior_std**2
        self._sites = find_sites(classifier.model, self._names, AFFINE, "use Linear and Conv2d")
        initial = 2 * math.log(INITIAL_STD * prior_std)
        self.mean = nn.ParameterList(start.values())
        self.log_var = nn.ParameterList(torch.full_like(t, initial) for t in start.values())

    def loss(self, inputs: Tensor, labels: Tensor, data: int, noise: torch.Generator) -> Tensor:
        """Return E_q[-log p_θ(y|x)] + KL(q ‖ prior) / n for a batch, with n data in all."""
        mean, var = self._named(self.mean), self._named([v.exp() for v in self.log_var])
        logits = local_reparameterised(self._classifier, self._sites, mean, var, inputs, noise)
        return nn.functional.cross_entropy(logits, labels) + self._divergence() / data

    def posterior(self) -> Diagonal:
        """Return N(μ, diag(s))."""
        mean, var = (m.detach() for m in self.mean), (v.detach().exp() for v in self.log_var)
        return Diagonal(self._named(mean), self._named(var))

    def _divergence(self) -> Tensor:
        """KL = ½ Σ (s + μ²)/σ₀² - log s, up to a constant."""
        terms = [
            (v.exp().sum() + m.square().sum()) / self._prior_var - v.sum()
            for m, v in zip(self.mean, self.log_var, strict=True)
        ]
        return torch.stack(terms).sum() / 2

    def _named(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, tensors, strict=True))
