"""Estimators of the curvature of the loss with respect to the logits.

For the softmax cross-entropy, the Hessian with respect to the logits is H = diag(p) - p pᵀ. Every
estimator yields vectors s (B, K) whose outer products s sᵀ sum to H, exactly or in expectation. A
backward pass with s as the gradient at the logits then gives a term of the curvature in the
weights.

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
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from acnml._util import checks


class Fisher(ABC):
    """A decomposition of the curvature at the logits into a sum of outer products."""

    @abstractmethod
    def vectors(self, probs: Tensor, labels: Tensor | None, rng: Generator) -> Iterator[Tensor]:
        """Yield the vectors s (B, K) of a batch with probabilities (B, K) and labels, if any (B,).

        The generator draws labels, where an estimator needs some.
        """


@final
@dataclass(frozen=True)
class ExactFisher(Fisher):
    """The exact Fisher matrix, which is also the generalised Gauss-Newton matrix; the default.

    It uses s_c = √p_c (e_c - p), one vector for every class c. This takes K backward passes per
    batch: with hundreds of classes, `MonteCarloFisher` is much faster.
    """

    def vectors(self, probs: Tensor, labels: Tensor | None, rng: Generator) -> Iterator[Tensor]:
        """Yield √p_c (e_c - p) for every class."""
        eye = torch.eye(probs.shape[1], dtype=probs.dtype, device=probs.device)
        for c in range(probs.shape[1]):
            yield probs[:, c, None].sqrt() * (eye[c] - probs)


@final
@dataclass(frozen=True)
class MonteCarloFisher(Fisher):
    """An unbiased estimate with sampled labels; it takes `samples` backward passes a batch.

    Args:
        samples: number of labels drawn from the model for every input.
        seed: random seed of the labels.
    """

    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        checks.settle_integers(self, samples=1, seed=None)

    def vectors(self, probs: Tensor, labels: Tensor | None, rng: Generator) -> Iterator[Tensor]:
        """Yield (e_y - p) / √samples for each sampled label y ~ p."""
        for _ in range(self.samples):
            # The precision decides which labels a seed draws, so it is fixed.
            narrow = probs.to(rng.device, torch.float32)
            drawn = torch.multinomial(narrow, 1, generator=rng)[:, 0]
            yield (_one_hot(drawn, probs) - probs) / math.sqrt(self.samples)


@final
@dataclass(frozen=True)
class EmpiricalFisher(Fisher):
    """The outer product of the loss gradients at the true labels; one backward pass per batch."""

    def vectors(self, probs: Tensor, labels: Tensor | None, rng: Generator) -> Iterator[Tensor]:
        """Yield e_y - p for the true labels y."""
        if labels is None:
            raise ValueError("EmpiricalFisher needs labels: yield (x, y) from the loader")
        yield _one_hot(labels, probs) - probs


def _one_hot(labels: Tensor, probs: Tensor) -> Tensor:
    return one_hot(labels.to(probs.device), probs.shape[1]).to(probs.dtype)
