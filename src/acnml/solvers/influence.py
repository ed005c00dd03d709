"""Influence: the first-order estimate of how well every label can be explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._algebra.convex import UNSOLVED
from acnml._algebra.dual import Affine
from acnml._algebra.kernels import Kernel, gap_variances
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.head.features import Features
from acnml.posteriors import Posterior
from acnml.solvers._linearisation import logit_kernel
from acnml.solvers.base import Solution, UnsolvedError

# Numbers in one block of labels, whose residuals are computed together.
BLOCK = 2**22

REMEDY = "lower alpha, or use a narrower posterior"


class SelfInfluence(NamedTuple):
    """What the estimate is made of, in double precision."""

    log_probs: Tensor  # log p_μ(y|x) (B, K)
    gain: Tensor  # (e_y - p)ᵀV(e_y - p) ≥ 0 (B, K)


@final
@dataclass(frozen=True)
class Influence:
    """The first-order estimate by influence functions (section 3.2 of the paper), for every label.

        log p_θ̂_y(y|x) ≈ log p_y + gᵀΣg = log p_y + (e_y - p)ᵀ V (e_y - p),    V = JΣJᵀ

    Here p are the probabilities at the posterior mean μ, J is the Jacobian of the logits, and
    g = ∇log p_μ(y|x) = Jᵀ(e_y - p). One full step of the paper's iteration leads from μ to
    θ = μ + Σg. The estimate is the change of log p along this step, to first order in Σ. It takes
    one Jacobian (none for a last layer) and no solver.

    *Sign and scale.* Σ is a covariance, so the second term is not negative. A Laplace posterior has
    Σ = -(nH)⁻¹ with the Hessian H of the paper's mean log-likelihood, which is negative definite.
    The weight α scales Σ, as for all solvers: the term is α gᵀΣg.

    *What it is not.* The exact solution differs by terms of order α². The estimate knows no upper
    limit: it can exceed log 1 = 0, because the second term grows with α, while the true likelihood
    saturates. It is returned as it is. `Acnml` normalises it by a softmax over labels, and the
    regret log Σ_y exp(estimate) is at least 0, but can exceed log K.

    `Solution.residual` measures θ = μ + Σg as a solution of the linearised problem: it is √(FᵀVF)
    with the gap F = p - softmax(z + V(e_y - p)). Where it exceeds 0.1 the label is not `solved`:
    the step overshoots, and `Linearised` gives another answer.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> x = torch.randn(100, 4)
    >>> posterior = acnml.fit_laplace(classifier, x)
    >>> predict = acnml.Acnml(classifier, posterior, acnml.solvers.Influence(), alpha=0.001)
    >>> predict(x[:5]).shape
    torch.Size([5, 3])
    """

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Estimate the log-likelihood of every label of every input."""
        logits, kernel = _moments(classifier, posterior, x)
        return _solution(logits, kernel)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the estimates, without residuals."""
        logits, kernel = _moments(classifier, posterior, x)
        return _estimate(logits, kernel).to(_wide(logits))

    def solve_features(
        self,
        found: Features,
        posterior: Posterior,
        layer: Affine,
        temperature: float,
    ) -> Solution:
        """Estimate from known features of the last layer, see `Linearised.solve_features`."""
        return _solution(found.logits, found.kernel(posterior, layer, temperature))


def self_influence(classifier: Classifier, posterior: Posterior, x: Inputs) -> SelfInfluence:
    """Return log p_y and (e_y - p)ᵀV(e_y - p) of every label, for a prepared batch."""
    return influence_of(*_moments(classifier, posterior, x))


def influence_of(logits: Tensor, kernel: Kernel) -> SelfInfluence:
    """Return log p_y and (e_y - p)ᵀV(e_y - p) for logits (B, K) and their covariance V."""
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    gain = gap_variances(kernel.double(), log_probs.exp())
    checks.require_finite(gain, "the covariances of the logits are", REMEDY, UnsolvedError)
    return SelfInfluence(log_probs, gain.clamp(min=0))


def _moments(classifier: Classifier, posterior: Posterior, x: Inputs) -> tuple[Tensor, Kernel]:
    logits, kernel = logit_kernel(classifier, posterior, x)
    if not bool(kernel.diagonal().any()):
        classifier.require_used(x, posterior.mean)
    return logits, kernel


def _estimate(logits: Tensor, kernel: Kernel) -> Tensor:
    return torch.stack(influence_of(logits, kernel)).sum(0)


def _solution(logits: Tensor, kernel: Kernel) -> Solution:
    log_lik, residual = _estimate(logits, kernel), _residual(logits, kernel)
    log_lik, residual = (tensor.to(_wide(logits)) for tensor in (log_lik, residual))
    return Solution(log_lik, residual, torch.zeros_like(log_lik), residual <= UNSOLVED)


def _residual(logits: Tensor, kernel: Kernel) -> Tensor:
    """Return √(FᵀVF) (B, K) with F = p - softmax(z + V(e_y - p)), some labels at a time."""
    z, wide = logits.double().unsqueeze(1), kernel.double()
    p, classes = z.softmax(-1), logits.shape[1]
    eye, parts = torch.eye(classes, dtype=z.dtype, device=z.device), []
    for targets in eye.split(max(1, BLOCK // logits.numel())):
        gap = p - (z + wide.mv(targets - p)).softmax(-1)
        parts.append((wide.mv(gap) * gap).sum(-1).clamp(min=0).sqrt())
    return torch.cat(parts, dim=1)


def _wide(logits: Tensor) -> torch.dtype:
    """Return the precision of a solution: that of the logits, but at least single."""
    return torch.promote_types(logits.dtype, torch.float32)
