"""What a solver is and what it returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.posteriors import Posterior


class Solution(NamedTuple):
    """For every input and label y: how well the model can explain y without leaving q.

    `log_lik` is log p_θ̂_y(y|x), not normalised. `residual` is √(gᵀΣg) for the gradient g of
    log p_θ(y|x) + log q(θ) at θ̂_y: zero at an optimum, and free of units, so that 0.1 means "a
    tenth of a posterior standard deviation to go".

    `omitted` is zero for every label that was solved for. With many classes some are not: their
    `log_lik` is that at the mean, and p_θ̂_y(y|x) exceeds its exponential by `omitted` at most.
    """

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K)
    omitted: Tensor  # (B, K)

    @property
    def log_probs(self) -> Tensor:
        """The ACNML distribution: log p_θ̂_y(y|x) - log C(x), (B, K)."""
        return torch.log_softmax(self.log_lik, dim=-1)

    @property
    def regret(self) -> Tensor:
        """log C(x) = log Σ_y p_θ̂_y(y|x), (B,): 0 where the model is sure, log K at most."""
        return torch.logsumexp(self.log_lik, dim=-1)


@final
class UnsolvedError(ValueError):
    """A solver has diverged, or stopped far from an optimum; the message says what to do."""


class Solver(Protocol):
    """A frozen dataclass value that finds θ̂_y = argmax_θ log p_θ(y|x) + log q(θ) for every y.

    The weight α of the paper is in the posterior: α log p + log q has the same maximiser as
    log p + log q_α with q_α = `posterior.scaled(α)`.
    """

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input of a prepared batch."""
        ...

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return only the log-likelihoods (B, K): what a prediction needs, without residuals."""
        ...
