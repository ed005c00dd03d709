"""Solving a batch in chunks of rows that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acnml._algebra.actions import TILE
from acnml._algebra.kernels import DIRECT
from acnml._engine.rows import Path, Rows
from acnml._engine.trust import require_understood
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import budget
from acnml.classifier import Classifier
from acnml.posteriors import Posterior
from acnml.solvers.base import UNSOLVED, Solution, UnsolvedError

# Copies of a row's activations that autograd, the factors and intermediate results hold at once,
# and copies of a row's gradients. Measured as peaks of processes, see docs/reliability.md.
COPIES = 7
COPIES_OF_GRADIENTS = 10


class Solved(NamedTuple):
    """Labels of a chunk of inputs, solved."""

    log_lik: Tensor  # (B, L)
    residual: Callable[[], Tensor]  # (B, L), at the cost of another gradient


class RowSolver(Protocol):
    """A solver that works on rows, the labels of a chunk of inputs."""

    @property
    def memory(self) -> int | None:
        """Bytes that a chunk may take; None leaves it to the library."""

    @property
    def n_gradients(self) -> int:
        """The number of gradients that a row's v is a sum of."""

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""

    def solve(self, rows: Rows, n_labels: int) -> Iterator[Solved]:
        """Solve for all labels of a chunk of inputs, at most `n_labels` at a time."""
        ...


def solution(
    solver: RowSolver, classifier: Classifier, posterior: Posterior, x: Inputs
) -> Solution:
    """Solve for every label of every input, with residuals."""
    log_lik, residual = _in_chunks(
        solver, classifier, posterior, x, lambda solved: (solved.log_lik, solved.residual())
    )
    return Solution(log_lik, residual, torch.zeros_like(log_lik), residual <= UNSOLVED)


def log_lik(solver: RowSolver, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
    """Solve for every label of every input, without residuals."""
    return _in_chunks(solver, classifier, posterior, x, lambda solved: (solved.log_lik,))[0]


def _in_chunks(
    solver: RowSolver,
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    wanted: Callable[[Solved], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Solve a chunk of inputs and labels at a time; return the wanted tensors, each (B, K)."""
    parts, done = [], 0
    for rows, n_labels in row_chunks(classifier, posterior, x, solver.n_gradients, solver.memory):
        with checks.counting_from(done, batches.size(x)):
            solved = [wanted(some) for some in solver.solve(rows, n_labels)]
        parts.append([torch.cat(tensors, dim=1) for tensors in zip(*solved, strict=True)])
        done += rows.size
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    checks.require_finite(whole[0], "log-likelihoods are", solver.remedy, UnsolvedError)
    return whole


def row_chunks(
    classifier: Classifier, posterior: Posterior, x: Inputs, n_gradients: int, memory: int | None
) -> Iterator[tuple[Rows, int]]:
    """Yield chunks of inputs, run at the mean, each with the number of labels to take at a time."""
    due = classifier.findings.is_due(posterior.mean, x)
    with classifier.naming_batch(x):
        first = Rows.at_mean(classifier, posterior, batches.take(x, slice(0, 1)), n_gradients)
    if due:
        require_understood(classifier.at(posterior.mean), first.sites, x)
    logits = first.start.logits
    row_bytes = posterior.dtype.itemsize * _scalars_per_row(first, n_gradients)
    affordable = int(budget(logits.device, memory)) // row_bytes
    n_inputs, n_labels = max(1, affordable // logits.shape[-1]), max(1, affordable)
    for index, chunk in enumerate(batches.chunks(x, n_inputs)):
        rows = Rows.at_mean(classifier, posterior, chunk, n_gradients)
        remedy = "check the model and these inputs"
        with checks.counting_from(index * n_inputs, batches.size(x)):
            checks.require_finite(rows.start.logits[:, 0], "the model's logits are", remedy)
        yield rows, n_labels


def label_chunks(rows: Rows, n_labels: int) -> tuple[Tensor, ...]:
    """Return all labels, at most `n_labels` at a time."""
    logits = rows.start.logits
    return torch.arange(logits.shape[-1], device=logits.device).split(n_labels)


def solved_at(rows: Rows, path: Path, labels: Tensor) -> Solved:
    """Evaluate the true network at the end of a path."""

    def residual() -> Tensor:
        gradient = rows.log_lik_gradient(rows.recorded(path, len(labels)), labels)
        return rows.residual(gradient.plus(path.v().scaled(-1)))

    return Solved(rows.log_lik(rows.logits(path, len(labels)), labels), residual)


def _scalars_per_row(rows: Rows, n_gradients: int) -> int:
    """Estimate the numbers that one row keeps in memory."""
    classes = rows.start.logits.shape[-1]
    total = COPIES * classes * min(classes, 2 * DIRECT)  # the Newton system, or its vectors
    for site, passed in rows.start.passages.items():
        sizes = [(one.received if one.inputs is None else one.inputs.vectors) for one in passed]
        ins, outs = sum(t.numel() for t in sizes), sum(one.output.numel() for one in passed)
        total += COPIES * (ins + outs)
        if site in rows.factored:
            positions = sum(t.shape[-2] for t in sizes)
            total += COPIES_OF_GRADIENTS * n_gradients * (ins + outs)
            total += positions * outs // classes + TILE if positions > 1 else 0
        else:
            shapes = (rows.posterior.mean[name].shape for name in site.layer.names)
            total += (COPIES + n_gradients) * sum(math.prod(shape) for shape in shapes)
    return max(total, 1)
