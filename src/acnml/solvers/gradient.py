"""Gradient: the paper's iteration, exactly, without a copy of the weights per label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch import Tensor

from acnml._engine import blocks
from acnml._engine.blocks import Solved
from acnml._engine.path import Path
from acnml._engine.rows import Rows
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.posteriors import Posterior
from acnml.solvers.base import Solution


@final
@dataclass(frozen=True)
class Gradient:
    """The iteration of `Reference`, with all rows in shared matrix products.

    In the dual form θ = μ + Σv the update reads v ← (1 - ε)v + ε ∇log p_θ(y|x): v is a weighted sum
    of gradients, which are outer products and stay so.

    Args:
        steps: number of updates. The paper takes 5, and 10 for KFAC posteriors.
        step_size: ε. The paper takes 0.5, and 0.25 for KFAC posteriors.
        memory: bytes that the rows solved at once may take; a share of what is free by default.
    """

    steps: int = 5
    step_size: float = 0.5
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be ≥ 0, got {self.steps}")
        checks.require_positive(self.step_size, "step_size")

    @property
    def gradients(self) -> int:
        """How many gradients a row's v is a sum of."""
        return self.steps

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""
        return f"the iteration diverged: lower step_size ({self.step_size}) or alpha"

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        return blocks.solution(self, classifier, posterior, x)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution, without a last gradient for residuals."""
        return blocks.log_lik(self, classifier, posterior, x)

    def solve(self, rows: Rows, at_once: int) -> Iterator[Solved]:
        """Solve for all labels of a block of inputs, so many labels at once."""
        for labels in blocks.some_labels(rows, at_once):
            yield self._solve(rows, labels)

    def _solve(self, rows: Rows, labels: Tensor) -> Solved:
        weights = rows.residuals(rows.start, labels)
        if self.steps == 0:
            start = Path.along(rows.tangent, weights)
            return Solved.every(
                rows.log_lik(rows.start.logits, labels), lambda: rows.residual(start.v())
            )
        path = Path.along(rows.tangent, self.step_size * weights)
        return ascend(rows, path, labels, self.steps - 1, self.step_size)


def ascend(rows: Rows, path: Path, labels: Tensor, steps: int, step_size: float) -> Solved:
    """Take steps of the paper's iteration along a path, and evaluate where they end."""
    path = walked(rows, path, labels, steps, step_size)
    logits = rows.evaluated(path, len(labels))

    def residual() -> Tensor:
        gradient = rows.log_lik_gradient(rows.displaced(path, len(labels)), labels)
        return rows.residual(gradient.blended(path.v(), 1, -1))

    return Solved.every(rows.log_lik(logits, labels), residual)


def walked(rows: Rows, path: Path, labels: Tensor, steps: int, step_size: float) -> Path:
    """Take steps of the paper's iteration, θ ← θ + ε Σ(∇log p_θ(y|x) + ∇log q(θ))."""
    for _ in range(steps):
        gradient = rows.log_lik_gradient(rows.displaced(path, len(labels)), labels)
        path = path.stepped(rows.posterior, gradient, step_size)
    return path
