"""Reference: a direct implementation of the paper's iteration, to test faster solvers against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from acnml._engine.trust import check
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.params import Params, add, dot, scale, subtract, zip_with
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.solution import Solution, UnsolvedError

# (parameters, inputs, labels), each with a leading row dimension -> (gradient, log p(y|x)) per row.
Gradients: TypeAlias = Callable[[Params, Inputs, Tensor], tuple[Params, Tensor]]


@final
@dataclass(frozen=True)
class Reference:
    """Gradient ascent from the posterior mean, preconditioned by Σ (Algorithm 1 of the paper).

        θ ← θ + ε Σ (∇ log p_θ(y|x) + ∇ log q(θ))

    A row is one label of one input. Every row has its own copy of the parameters that the posterior
    covers.

    Args:
        steps: number of updates. The paper uses 5, and 10 for KFAC posteriors.
        step_size: ε. The paper uses 0.5, and 0.25 for KFAC posteriors.
        rows_at_once: number of rows per vectorised computation. Memory grows with it. Use 1 for
            models that `torch.func.vmap` does not support; rows then run one by one without it.

    >>> posterior = acnml.fit_laplace(classifier, x)
    >>> slow, fast = Reference(), acnml.Gradient()
    >>> both = (solver.log_lik(classifier, posterior, x) for solver in (slow, fast))
    >>> torch.allclose(*both, atol=1e-5)
    True
    """

    steps: int = 5
    step_size: float = 0.5
    rows_at_once: int = 64

    def __post_init__(self) -> None:
        if self.steps < 0 or self.rows_at_once < 1:
            raise ValueError(f"steps must be ≥ 0 and rows_at_once ≥ 1, got {self}")
        checks.require_positive(self.step_size, "step_size")

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        logits = classifier.logits(x, posterior.mean)
        checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
        if classifier.findings.is_due((), x):
            check(classifier, x)
        classifier.require_used(x, posterior.mean)
        gradients = _row_gradients(classifier, one_by_one=self.rows_at_once == 1)
        classes = logits.shape[1]
        solved = [
            self._ascend(gradients, posterior, batches.take(x, rows // classes), rows % classes)
            for rows in torch.arange(logits.numel(), device=logits.device).split(self.rows_at_once)
        ]
        log_lik, residual = (
            torch.cat(parts).view_as(logits) for parts in zip(*solved, strict=True)
        )
        remedy = f"the iteration diverged: lower step_size ({self.step_size}) or alpha"
        checks.require_finite(log_lik, "log-likelihoods are", remedy, UnsolvedError)
        return Solution(log_lik, residual)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution."""
        return self(classifier, posterior, x).log_lik

    def _ascend(
        self, gradients: Gradients, posterior: Posterior, x: Inputs, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (log p_θ̂(y|x), residual) for rows of one input and one label each.

        The iteration stores v = Σ⁻¹(θ - μ) in addition to θ. Then ∇ log q(θ) = -v, and no inverse
        of Σ is needed.
        """
        theta = {n: t.expand(len(labels), *t.shape) for n, t in posterior.mean.items()}
        v = zip_with(torch.zeros_like, theta)
        grad, log_lik = gradients(theta, x, labels)  # gradient of the objective, because v = 0
        for _ in range(self.steps):
            v = add(v, scale(grad, self.step_size))
            theta = add(posterior.mean, posterior.cov_mv(v))
            grad_log_lik, log_lik = gradients(theta, x, labels)
            grad = subtract(grad_log_lik, v)
        squared = dot(grad, posterior.cov_mv(grad), posterior.mean)
        return log_lik, squared.clamp(min=0).sqrt()


def _row_gradients(classifier: Classifier, *, one_by_one: bool) -> Gradients:
    """Return a function that computes ∇_θ log p_θ(y|x) and log p_θ(y|x) for rows of (θ, x, y)."""

    def log_lik(theta: Params, x: Inputs, label: Tensor) -> Tensor:
        one = batches.map_inputs(x, lambda tensor: tensor.unsqueeze(0))
        return classifier.log_probs(one, theta)[0].gather(0, label.unsqueeze(0)).squeeze(0)

    def vectorised(theta: Params, x: Inputs, labels: Tensor) -> tuple[Params, Tensor]:
        try:
            return vmap(grad_and_value(log_lik))(theta, x, labels)
        except (RuntimeError, ValueError) as error:  # the model has already run without vmap
            raise ValueError(
                "torch.func.vmap cannot vectorise this model; use "
                f"Reference(rows_at_once=1), which runs it row by row: {error}"
            ) from error

    def in_a_loop(theta: Params, x: Inputs, labels: Tensor) -> tuple[Params, Tensor]:
        row = {name: tensor[0] for name, tensor in theta.items()}
        grad, value = grad_and_value(log_lik)(row, batches.take(x, 0), labels[0])
        return {name: tensor.unsqueeze(0) for name, tensor in grad.items()}, value.unsqueeze(0)

    return in_a_loop if one_by_one else vectorised
