"""Estimators of the curvature of the loss with respect to the logits.

For the softmax cross-entropy, the Hessian with respect to the logits is H = diag(p) - p pᵀ. Every
estimator yields vectors s (B, K) whose outer products s sᵀ sum to H, exactly or in expectation. A
backward pass with s as the gradient at the logits then gives a term of the curvature in the
weights. The last layer needs no backward pass, and `summed`, `squares`, `squares_in` and `hessians`
return the sums for it.

Probabilities are in double precision: for a confident network 1 - p is small, and in single
precision it has lost its digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from acnml._util import checks


class Fisher(ABC):
    """A decomposition of the curvature at the logits into a sum of outer products."""

    @abstractmethod
    def cotangents(
        self, probs: Tensor, labels: Tensor | None, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield the vectors s (B, K) for a batch with probabilities (B, K)."""

    def summed(self, probs: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return Σ s sᵀ over the batch and all vectors, (K, K)."""
        vectors = self.cotangents(probs, labels, generator)
        return torch.stack([s.T @ s for s in vectors]).sum(0)

    def squares(self, probs: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return Σ s² over all vectors for every input, (B, K)."""
        return torch.stack([s**2 for s in self.cotangents(probs, labels, generator)]).sum(0)

    def squares_in(
        self, basis: Tensor, probs: Tensor, labels: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Return Σ (Uᵀs)² over all vectors for every input, (B, K), with a basis U (K, K)."""
        vectors = self.cotangents(probs, labels, generator)
        return torch.stack([(s @ basis.to(s.dtype)) ** 2 for s in vectors]).sum(0)

    def hessians(self, probs: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return Σ s sᵀ over all vectors for every input, (B, K, K)."""
        vectors = torch.stack(list(self.cotangents(probs, labels, generator)), dim=1)
        return vectors.mT @ vectors


@final
@dataclass(frozen=True)
class ExactFisher(Fisher):
    """The exact Fisher matrix, which is also the generalised Gauss-Newton matrix.

    It uses s_c = √p_c (e_c - p), one vector for every class c. This takes K backward passes per
    batch, or none for a last layer.

    >>> import acnml, torch
    >>> data = [(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(5)]
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_kfac_laplace(classifier, data, fisher=acnml.ExactFisher())  # the default
    Kronecker(15 parameters: weight … bias)
    """

    def cotangents(
        self, probs: Tensor, labels: Tensor | None, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield √p_c (e_c - p) for every class."""
        eye = torch.eye(probs.shape[1], dtype=probs.dtype, device=probs.device)
        for c in range(probs.shape[1]):
            yield probs[:, c, None].sqrt() * (eye[c] - probs)

    def summed(self, probs: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return Σ (diag(p) - p pᵀ).

        Its rows sum to zero, so the diagonal is the sum of all that is beside it. This form does
        not cancel, however confident the predictions are.
        """
        beside = (probs.T @ probs).fill_diagonal_(0)
        return torch.diag(beside.sum(1)) - beside

    def squares(self, probs: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return p (1 - p)."""
        return probs * (1 - probs)

    def squares_in(
        self, basis: Tensor, probs: Tensor, labels: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Return Σ_c p_c U_co² - (Σ_c p_c U_co)², the diagonal of Uᵀ(diag(p) - p pᵀ)U.

        It is the variance of row c of U for c ~ p. The difference cancels for confident
        predictions, so it is taken in double precision, of probabilities that sum to 1 there.
        """
        wide, U = probs.double(), basis.double()
        wide = wide / wide.sum(-1, keepdim=True)
        return (wide @ U**2 - (wide @ U) ** 2).clamp(min=0).to(probs.dtype)

    def hessians(self, probs: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return diag(p) - p pᵀ of every input."""
        return torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)


@final
@dataclass(frozen=True)
class MonteCarloFisher(Fisher):
    """An unbiased estimate with sampled labels; it takes `samples` backward passes a batch.

    Args:
        samples: number of labels drawn from the model for every input.
        seed: random seed of the labels.

    >>> import acnml, torch
    >>> data = [(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(5)]
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_kfac_laplace(classifier, data, fisher=acnml.MonteCarloFisher(samples=2))
    Kronecker(15 parameters: weight … bias)
    """

    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        checks.settle_integers(self, samples=1, seed=None)

    def cotangents(
        self, probs: Tensor, labels: Tensor | None, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield (e_y - p) / √samples for each sampled label y ~ p."""
        for _ in range(self.samples):
            # The precision decides which labels a seed draws, so it is fixed.
            narrow = probs.to(generator.device, torch.float32)
            drawn = torch.multinomial(narrow, 1, generator=generator)[:, 0]
            yield (_one_hot(drawn.to(probs.device), probs) - probs) / math.sqrt(self.samples)


@final
@dataclass(frozen=True)
class EmpiricalFisher(Fisher):
    """The outer product of the loss gradients at the true labels; one backward pass per batch.

    >>> import acnml, torch
    >>> data = [(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(5)]
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_kfac_laplace(classifier, data, fisher=acnml.EmpiricalFisher())
    Kronecker(15 parameters: weight … bias)
    """

    def cotangents(
        self, probs: Tensor, labels: Tensor | None, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield e_y - p for the true labels y."""
        if labels is None:
            raise ValueError("EmpiricalFisher needs labels: yield (x, y) from the loader")
        yield _one_hot(labels.to(probs.device), probs) - probs


def _one_hot(labels: Tensor, probs: Tensor) -> Tensor:
    return one_hot(labels, probs.shape[1]).to(probs.dtype)
