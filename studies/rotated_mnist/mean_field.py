"""Bayes by Backprop as a network to train: means and log-variances are its parameters.

The objective is that of `acnml.fit_bayes_by_backprop`. This form can be stopped after any epoch and
taken up again, and the variances may learn at a rate of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn

from acnml import Classifier, Diagonal
from acnml._engine.layers import AFFINE, find_sites
from acnml._util.params import Params
from acnml.fitting.bayes_by_backprop import INITIAL_STD, local_reparameterised


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

    def loss(self, images: Tensor, labels: Tensor, data: int, noise: torch.Generator) -> Tensor:
        """Return E_q[-log p_θ(y|x)] + KL(q ‖ prior) / n for a batch, with n data in all."""
        mean, var = self._named(self.mean), self._named([v.exp() for v in self.log_var])
        logits = local_reparameterised(self._classifier, self._sites, mean, var, images, noise)
        return nn.functional.cross_entropy(logits, labels) + self._divergence() / data

    def posterior(self) -> Diagonal:
        """Return N(μ, diag(s))."""
        mean, var = (m.detach() for m in self.mean), (v.detach().exp() for v in self.log_var)
        return Diagonal(self._named(mean), self._named(var))

    def _divergence(self) -> Tensor:
        """KL = ½ Σ (s + μ²)/σ₀² - log s, but for a constant."""
        terms = [
            (v.exp().sum() + m.square().sum()) / self._prior_var - v.sum()
            for m, v in zip(self.mean, self.log_var, strict=True)
        ]
        return torch.stack(terms).sum() / 2

    def _named(self, tensors: Iterable[Tensor]) -> Params:
        return dict(zip(self._names, tensors, strict=True))
