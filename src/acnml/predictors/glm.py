"""Glm: the prediction of the linearised network, a Bayesian generalised linear model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml._util.params import normal_like
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.predictors.base import Predictor, matched
from acnml.predictors.ensemble import log_mean
from acnml.problem import Problem, of_problems


class Link(Protocol):
    """A frozen dataclass that computes E[softmax f] for Gaussian logits f ~ N(m, V)."""

    def __call__(self, problem: Problem) -> Tensor:
        """Return log-probabilities (B, K)."""
        ...


@final
@dataclass(frozen=True)
class Probit:
    """The approximation softmax(m / √(1 + π/8 diag V)).

    It needs no sampling, but ignores the correlations between logits.

    >>> from acnml.problem import Problem, of_problems
    >>> one = Problem(torch.tensor([[1.0, 0.0]]), torch.eye(2)[None])
    >>> Probit()(one).exp()
    tensor([[0.7000, 0.3000]])
    """

    def __call__(self, problem: Problem) -> Tensor:
        """Return log-probabilities (B, K)."""
        var = problem.kernel.diagonal(dim1=1, dim2=2)
        return torch.log_softmax(problem.logits / (1 + math.pi / 8 * var).sqrt(), dim=-1)


@final
@dataclass(frozen=True)
class LogitSampling:
    """The estimate (1/n) Σ_i softmax(m + V^½ εᵢ) with εᵢ ~ N(0, I), exact in the limit n → ∞.

    All inputs share the εᵢ, so that the prediction for an input does not depend on its batch.

    Args:
        samples: the number n of samples.
        seed: random seed of the εᵢ.

    >>> from acnml.problem import Problem, of_problems
    >>> one = Problem(torch.tensor([[1.0, 0.0]]), torch.eye(2)[None])
    >>> LogitSampling(samples=50)(one).shape
    torch.Size([1, 2])
    """

    samples: int = 100
    seed: int = 0

    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        checks.settle_integers(self, samples=1, seed=None)

    def __call__(self, problem: Problem) -> Tensor:
        """Return log-probabilities (B, K)."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = normal_like(problem.logits[0], self.samples, generator)  # (n, K)
        # V is often singular, where a Cholesky factorisation would fail. The root U √Λ Uᵀ is
        # unique; the signs of U √Λ, and so the samples, would depend on rounding.
        values, vectors = torch.linalg.eigh(problem.kernel)
        root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
        return log_mean([torch.log_softmax(problem.logits + root @ e, dim=-1) for e in noise])


@final
@dataclass(frozen=True, eq=False)
class Glm(Predictor):
    """E[softmax f] with f ~ N(f_μ(x), J Σ Jᵀ), J = ∂f/∂θ at μ (Immer et al. 2021).

    Here f_μ(x) are the logits at the posterior mean μ. Use it for Laplace posteriors, whose
    curvature (GGN, KFAC) is also that of the linearised network. Samples of their weights, as in
    `Bma`, often lie outside the region in which the approximation is accurate.

    Args:
        classifier: the model.
        posterior: the posterior N(μ, Σ).
        link: how to compute probabilities from the Gaussian logits, `Probit()` or
            `LogitSampling()`.

    >>> acnml.Glm(classifier, posterior)(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    classifier: Classifier
    posterior: Posterior
    link: Link = Probit()

    def __post_init__(self) -> None:
        object.__setattr__(self, "posterior", matched(self.posterior, self.classifier))

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the log of the expected probabilities."""

        def linked(problem: Problem) -> Tensor:
            return self.link(problem).to(problem.dtype)

        # The links need all of V, not only the covariance of differences.
        parts = of_problems(self.classifier, self.posterior, x, linked, differences=False)
        log_probs = torch.cat(parts)
        return checks.require_finite(log_probs, "log-probabilities are", "check the posterior")
