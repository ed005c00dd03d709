"""Solver: the interface of all solvers, and LogitSolver: those that need only a `Problem`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from acnml._util import batches
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.problem import Problem, each_solved, joined, problems
from acnml.solution import Solution


class Solver(Protocol):
    """A frozen dataclass that finds θ̂_y = argmax_θ log p_θ(y|x) + log q(θ) for every label y.

    The paper's weight α of the query is part of the posterior: α log p + log q has the same
    maximiser as log p + log q_α, where q_α is `posterior.scaled(α)`.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
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


class LogitSolver(ABC):
    """A solver that needs only the `Problem` of an input: its logits and their covariance.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
    >>> problem = acnml.Acnml(classifier, posterior).problem(torch.randn(5, 4))
    >>> solver: acnml.solve.LogitSolver = acnml.Linearised()
    >>> solver.of(problem).log_lik.shape
    torch.Size([5, 3])
    """

    memory: int | None = None

    @property
    def takes_problem(self) -> bool:
        """Whether `of` is all that this solver does, with its present settings."""
        return True

    @abstractmethod
    def of(self, problem: Problem) -> Solution:
        """Solve for every label of every input of a problem."""

    def log_lik_of(self, problem: Problem) -> Tensor:
        """Return only the log-likelihoods (B, K)."""
        return self.of(problem).log_lik

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        parts = problems(classifier, posterior, x, self.memory)
        return joined(each_solved(parts, self.of, batches.size(x)))

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution."""
        parts = problems(classifier, posterior, x, self.memory)
        return torch.cat(each_solved(parts, self.log_lik_of, batches.size(x)))
