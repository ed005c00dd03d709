"""Solver: the interface of all solvers; RowSolver: those that run the network for every label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from acnml._engine.rows import Rows, row_chunks
from acnml._engine.trust import check
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.solution import Solution, UnsolvedError


class Solver(Protocol):
    """A frozen dataclass that finds θ̂_y = argmax_θ log p_θ(y|x) + log q(θ) for every label y.

    The paper's weight α of the query is part of the posterior: α log p + log q has the same
    maximiser as log p + log q_α, where q_α is `posterior.scaled(α)`.

    >>> solver: acnml.solve.Solver = acnml.Linearised()
    >>> solver.log_lik(classifier, posterior, torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input of a prepared batch."""
        ...

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return only the log-likelihoods (B, K). It may skip residuals."""
        ...


class Solved(NamedTuple):
    """Labels of a chunk of inputs, solved."""

    log_lik: Tensor  # (B, L)
    residual: Tensor | None  # (B, L), where it was asked for


class RowSolver(ABC):
    """A solver that runs rows, the labels of a chunk of inputs, at weights of their own."""

    memory: int | None  # bytes that a chunk may take
    n_gradients: int  # that a row's v is a sum of
    remedy: str  # where the solution is not finite

    @abstractmethod
    def records(self, with_residuals: bool) -> bool:
        """Whether rows are run with a graph, to pull gradients back."""

    @abstractmethod
    def solve(self, rows: Rows, labels: Sequence[Tensor], with_residuals: bool) -> Iterator[Solved]:
        """Solve for some labels at a time. Residuals take another gradient."""

    @final
    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input, with residuals."""
        log_lik, residual = self._in_chunks(classifier, posterior, x, with_residuals=True)
        return Solution(log_lik, residual)

    @final
    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Solve for every label of every input, without a last gradient for residuals."""
        return self._in_chunks(classifier, posterior, x, with_residuals=False)[0]

    def _in_chunks(
        self, classifier: Classifier, posterior: Posterior, x: Inputs, with_residuals: bool
    ) -> list[Tensor]:
        """Solve a chunk of inputs and labels at a time; return (B, K) of what was asked for."""
        due = classifier.findings.is_due(posterior.mean, x)
        recorded, parts, done = self.records(with_residuals), [], 0
        chunks = row_chunks(classifier, posterior, x, self.n_gradients, self.memory, recorded)
        for rows, labels in chunks:
            if due:
                check(classifier.at(posterior.mean), x, rows.sites)
            due = False
            with checks.counting_from(done, batches.size(x)):
                solved = list(self.solve(rows, labels, with_residuals))
            by_label = [one if with_residuals else one[:1] for one in solved]
            parts.append([torch.cat(tensors, dim=1) for tensors in zip(*by_label, strict=True)])
            done += rows.size
        whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        checks.require_finite(whole[0], "log-likelihoods are", self.remedy, UnsolvedError)
        return whole
