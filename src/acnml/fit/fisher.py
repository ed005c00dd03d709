"""Estimators of the curvature of the loss with respect to the logits.

For the softmax cross-entropy, the Hessian with respect to the logits is H = diag(p) - p pᵀ. Every
estimator yields vectors s (B, K) whose outer products s sᵀ sum to H, exactly or in expectation. A
backward pass with s as the gradient at the logits then gives a term of the curvature in the
weights. The last layer needs no backward pass.

Probabilities are in double precision: for a confident network 1 - p is small, and in single
precision it has lost its digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from acnml._util import checks


class Outputs(NamedTuple):
    """What a network says of a batch."""

    probs: Tensor  # (B, K)
    labels: Tensor | None  # (B,), if there are any
    generator: torch.Generator  # draws labels, where an estimator needs some
    temperature: float = 1.0  # by which the logits are divided

    def split(self, rows: int) -> Iterator[Outputs]:
        """Yield parts of so many inputs."""
        for start in range(0, len(self.probs), rows):
            labels = None if self.labels is None else self.labels[start : start + rows]
            yield self._replace(probs=self.probs[start : start + rows], labels=labels)


class Fisher(ABC):
    """A decomposition of the curvature at the logits into a sum of outer products."""

    @abstractmethod
    def vectors(self, outputs: Outputs) -> Iterator[Tensor]:
        """Yield the vectors s (B, K) of a batch."""

    def hessians(self, outputs: Outputs) -> Tensor:
        """Return Σ s sᵀ over all vectors for every input, (B, K, K)."""
        stacked = torch.stack(list(self.vectors(outputs)), dim=1)
        return stacked.mT @ stacked


@final
@dataclass(frozen=True)
class ExactFisher(Fisher):
    """The exact Fisher matrix, which is also the generalised Gauss-Newton matrix; the default.

    It uses s_c = √p_c (e_c - p), one vector for every class c. This takes K backward passes per
    batch, or none for a last layer.
    """

    def vectors(self, outputs: Outputs) -> Iterator[Tensor]:
        """Yield √p_c (e_c - p) for every class."""
        probs = outputs.probs
        eye = torch.eye(probs.shape[1], dtype=probs.dtype, device=probs.device)
        for c in range(probs.shape[1]):
            yield probs[:, c, None].sqrt() * (eye[c] - probs)

    def hessians(self, outputs: Outputs) -> Tensor:
        """Return diag(p) - p pᵀ of every input.

        Its rows sum to zero, so the diagonal is the sum of all that is beside it. This form does
        not cancel, however confident the predictions are.
        """
        probs = outputs.probs
        hessians = -probs.unsqueeze(2) * probs.unsqueeze(1)
        diagonal = hessians.diagonal(dim1=1, dim2=2)
        diagonal.zero_()
        diagonal.copy_(-hessians.sum(2))
        return hessians


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

    def vectors(self, outputs: Outputs) -> Iterator[Tensor]:
        """Yield (e_y - p) / √samples for each sampled label y ~ p."""
        probs, generator = outputs.probs, outputs.generator
        for _ in range(self.samples):
            # The precision decides which labels a seed draws, so it is fixed.
            narrow = probs.to(generator.device, torch.float32)
            drawn = torch.multinomial(narrow, 1, generator=generator)[:, 0]
            yield (_one_hot(drawn, probs) - probs) / math.sqrt(self.samples)


@final
@dataclass(frozen=True)
class EmpiricalFisher(Fisher):
    """The outer product of the loss gradients at the true labels; one backward pass per batch."""

    def vectors(self, outputs: Outputs) -> Iterator[Tensor]:
        """Yield e_y - p for the true labels y."""
        if outputs.labels is None:
            raise ValueError("EmpiricalFisher needs labels: yield (x, y) from the loader")
        yield _one_hot(outputs.labels, outputs.probs) - outputs.probs


def _one_hot(labels: Tensor, probs: Tensor) -> Tensor:
    return one_hot(labels.to(probs.device), probs.shape[1]).to(probs.dtype)
