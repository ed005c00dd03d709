"""Cutting a batch into blocks of rows that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acnml._algebra.kernels import DIRECT
from acnml._algebra.rules import BIT
from acnml._engine.layers import require_understood
from acnml._engine.rows import Rows
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import budget
from acnml.classifier import Classifier
from acnml.posteriors import Posterior
from acnml.solvers.base import Solution, UnsolvedError

# Copies of a row's activations that autograd, the factors and intermediate results hold at once.
COPIES = 4


class Solved(NamedTuple):
    """Labels of a block of inputs, solved."""

    log_lik: Tensor  # (B, L)
    residual: Callable[[], Tensor]  # (B, L), for the price of another gradient
    omitted: Tensor  # (B, L)

    @staticmethod
    def every(log_lik: Tensor, residual: Callable[[], Tensor]) -> Solved:
        """Every label was solved for."""
        return Solved(log_lik, residual, torch.zeros_like(log_lik))


class RowSolver(Protocol):
    """A solver that works on rows: the labels of a block of inputs."""

    @property
    def memory(self) -> int | None:
        """Bytes that a block may take; None leaves it to the library."""

    @property
    def gradients(self) -> int:
        """How many gradients a row's v is a sum of."""

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""

    def solve(self, rows: Rows, at_once: int) -> Iterator[Solved]:
        """Solve for all labels of a block of inputs, so many labels at once."""
        ...


def solution(
    solver: RowSolver, classifier: Classifier, posterior: Posterior, x: Inputs
) -> Solution:
    """Solve for every label of every input, with residuals."""
    tensors = _in_blocks(
        solver, classifier, posterior, x, lambda s: (s.log_lik, s.residual(), s.omitted)
    )
    return Solution(*tensors)


def log_lik(solver: RowSolver, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
    """Solve for every label of every input, without residuals."""
    return _in_blocks(solver, classifier, posterior, x, lambda solved: (solved.log_lik,))[0]


def _in_blocks(
    solver: RowSolver,
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    wanted: Callable[[Solved], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Solve a block of inputs and labels at a time; return the tensors wanted, each (B, K)."""
    parts = []
    for rows, at_once in row_blocks(classifier, posterior, x, solver.gradients, solver.memory):
        solved = [wanted(some) for some in solver.solve(rows, at_once)]
        parts.append([torch.cat(tensors, dim=1) for tensors in zip(*solved, strict=True)])
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    checks.require_finite(whole[0], "log-likelihoods are", solver.remedy, UnsolvedError)
    return whole


def some_labels(rows: Rows, at_once: int) -> tuple[Tensor, ...]:
    """Return all labels, so many at once."""
    logits = rows.start.logits
    return torch.arange(logits.shape[-1], device=logits.device).split(at_once)


def row_blocks(
    classifier: Classifier, posterior: Posterior, x: Inputs, gradients: int, memory: int | None
) -> Iterator[tuple[Rows, int]]:
    """Yield blocks of inputs, run at the mean, each with the number of labels to take at once."""
    one = Rows.at_mean(classifier, posterior, batches.take(x, slice(0, 1)), gradients)
    require_understood(classifier.at(posterior.mean), one.sites, x)
    logits = one.start.logits
    row_bytes = posterior.dtype.itemsize * _scalars_per_row(one, gradients)
    affordable = budget(logits.device, memory) // row_bytes
    inputs, labels = max(1, affordable // logits.shape[-1]), max(1, affordable)
    for block in batches.blocks(x, inputs):
        rows = Rows.at_mean(classifier, posterior, block, gradients)
        remedy = "check the model and these inputs"
        checks.require_finite(rows.start.logits[:, 0], "the model's logits are", remedy)
        yield rows, labels


def _scalars_per_row(rows: Rows, gradients: int) -> int:
    """Estimate the numbers that one row keeps in memory."""
    classes = rows.start.logits.shape[-1]
    total = COPIES * classes * min(classes, 2 * DIRECT)  # Newton's system, or his vectors
    for site, taken in rows.start.passages.items():
        ins = sum(one.inputs.numel() for one in taken)
        outs = sum(one.output.numel() for one in taken)
        total += COPIES * (ins + outs)
        if site in rows.factored:
            positions = sum(one.inputs.shape[-2] for one in taken)
            total += gradients * (ins + outs)
            total += positions * outs // classes + BIT if positions > 1 else 0
        else:
            shapes = (rows.posterior.mean[name].shape for name in site.layer.names)
            total += COPIES * sum(math.prod(shape) for shape in shapes)
    return max(total, 1)
