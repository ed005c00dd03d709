"""Influence: the first-order estimate of how well every label can be explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml.problem import LogitSolver, Problem
from acnml.solution import Solution


@final
@dataclass(frozen=True)
class Influence(LogitSolver):
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

    >>> posterior = acnml.fit_laplace(classifier, x)
    >>> acnml.Acnml(classifier, posterior, acnml.solve.Influence(), alpha=0.001)(x).shape
    torch.Size([100, 3])
    """

    def of(self, problem: Problem) -> Solution:
        """Estimate the log-likelihood of every label of every input."""
        residual = _residual(problem.logits, problem.kernel)
        return Solution(self_influence(problem).sum(0), residual.to(problem.dtype))


def self_influence(problem: Problem) -> Tensor:
    """Return log p_y and (e_y - p)ᵀV(e_y - p) of every label, (2, B, K)."""
    log_probs = torch.log_softmax(problem.logits, dim=-1)
    p, var = log_probs.exp(), problem.kernel.diagonal(dim1=1, dim2=2)
    moved = (p.unsqueeze(1) @ problem.kernel).squeeze(1)
    gain = var - 2 * moved + (p * moved).sum(-1, keepdim=True)
    return torch.stack([log_probs, gain.clamp(min=0)]).to(problem.dtype)


def _residual(logits: Tensor, kernel: Tensor) -> Tensor:
    """Return √(FᵀVF) (B, K) with F = p - softmax(z + V(e_y - p))."""
    z = logits.unsqueeze(1)
    eye = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
    p = z.softmax(-1)
    gap = p - (z + (eye - p) @ kernel).softmax(-1)
    return ((gap @ kernel) * gap).sum(-1).clamp(min=0).sqrt()
