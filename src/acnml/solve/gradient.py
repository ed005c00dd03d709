"""Gradient: the paper's iteration, exactly, without a copy of the weights per label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

from torch import Tensor

from acnml._engine import chunks
from acnml._engine.chunks import Solved, label_chunks, solved_at
from acnml._engine.rows import Path, Rows
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml._util.memory import require_memory
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.solution import Solution


@final
@dataclass(frozen=True)
class Gradient:
    """The iteration of `Reference`, with all rows in shared matrix products.

    In the dual form θ = μ + Σv the update reads v ← (1 - ε)v + ε ∇log p_θ(y|x): v is a weighted sum
    of gradients, which are outer products and stay so. The iterates are the paper's, whatever they
    do to the objective: check `Solution.solved`.

    Args:
        steps: number of updates. The paper uses 5, and 10 for KFAC posteriors.
        step_size: ε. The paper uses 0.5, and 0.25 for KFAC posteriors.
        memory: bytes that the rows solved at once may take; by default a share of what is free.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
    >>> predict = acnml.Acnml(classifier, posterior, acnml.Gradient(steps=10))
    >>> predict(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    steps: int = 5
    step_size: float = 0.5
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be ≥ 0, got {self.steps}")
        checks.require_positive(self.step_size, "step_size")
        require_memory(self.memory)

    @property
    def n_gradients(self) -> int:
        """The number of gradients that a row's v is a sum of."""
        return self.steps

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""
        return f"the iteration diverged: lower step_size ({self.step_size}) or alpha"

    def records(self, with_residuals: bool) -> bool:
        """Whether rows are run with a graph: all steps but the first are."""
        return with_residuals or self.steps > 1

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        return chunks.solution(self, classifier, posterior, x)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution, without a last gradient for residuals."""
        return chunks.log_lik(self, classifier, posterior, x)

    def solve(self, rows: Rows, n_labels: int, with_residuals: bool) -> Iterator[Solved]:
        """Solve for all labels of a chunk of inputs, at most `n_labels` at a time."""
        for labels in label_chunks(rows, n_labels):
            weights = rows.logit_gradient(rows.start.logits, labels)
            if self.steps > 0:
                first = Path.along(rows.tangent, self.step_size * weights)
                path = rows.ascended(first, labels, self.steps - 1, self.step_size)
                yield solved_at(rows, path, labels, with_residuals)
            else:
                yield Solved(
                    rows.log_lik(rows.start.logits, labels),
                    partial(rows.residual, Path.along(rows.tangent, weights).v()),
                )
