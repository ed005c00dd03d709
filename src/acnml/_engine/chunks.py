"""Solving a batch in chunks of rows that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acnml._engine.layers import Site
from acnml._engine.rows import Path, Rows
from acnml._engine.trust import require_understood
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import MOST, default_budget
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.solution import UNSOLVED, Solution, UnsolvedError

# Copies of a row's activations that autograd, the factors and intermediate results hold at once,
# and copies of a row's gradients. Measured as peaks of processes, see docs/reliability.md.
COPIES = 7
COPIES_OF_GRADIENTS = 10

# The same for rows that are run for their logits alone, one layer after the other and without a
# graph: the Jacobian and ΣJᵀ stay, next to what the widest layer needs.
COPIES_OF_DELTAS = 2
COPIES_OF_FACTORS = 5
COPIES_OF_WEIGHTS = 3
COPIES_OF_WIDEST = 3

# The default maximum for their chunks, in bytes. In larger chunks, page faults of newly requested
# memory cost more than the larger batch gains.
MOST_UNRECORDED = MOST // 2


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

    def records(self, with_residuals: bool) -> bool:
        """Whether rows are run with a graph, to pull gradients back."""
        ...

    def solve(self, rows: Rows, n_labels: int, with_residuals: bool) -> Iterator[Solved]:
        """Solve for all labels of a chunk of inputs, at most `n_labels` at a time.

        Without residuals, `Solved.residual` is not called and its pass need not be recorded.
        """
        ...


def solution(
    solver: RowSolver, classifier: Classifier, posterior: Posterior, x: Inputs
) -> Solution:
    """Solve for every label of every input, with residuals."""
    log_lik, residual = _in_chunks(solver, classifier, posterior, x, with_residuals=True)
    return Solution(log_lik, residual, torch.zeros_like(log_lik), residual <= UNSOLVED)


def log_lik(solver: RowSolver, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
    """Solve for every label of every input, without residuals."""
    return _in_chunks(solver, classifier, posterior, x, with_residuals=False)[0]


def _in_chunks(
    solver: RowSolver,
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    with_residuals: bool,
) -> list[Tensor]:
    """Solve a chunk of inputs and labels at a time; return log-likelihoods and residuals (B, K)."""
    parts, done = [], 0
    recorded, n_gradients = solver.records(with_residuals), solver.n_gradients
    for rows, n_labels in row_chunks(
        classifier, posterior, x, n_gradients, solver.memory, recorded
    ):
        with checks.counting_from(done, batches.size(x)):
            solved = [
                (some.log_lik, some.residual()) if with_residuals else (some.log_lik,)
                for some in solver.solve(rows, n_labels, with_residuals)
            ]
        parts.append([torch.cat(tensors, dim=1) for tensors in zip(*solved, strict=True)])
        done += rows.size
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    checks.require_finite(whole[0], "log-likelihoods are", solver.remedy, UnsolvedError)
    return whole


def row_chunks(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    n_gradients: int,
    memory: int | None,
    recorded: bool = True,
) -> Iterator[tuple[Rows, int]]:
    """Yield chunks of inputs, run at the mean, each with the number of labels to take at a time.

    Rows that will be `recorded` keep a graph and take more memory.
    """
    due = classifier.findings.is_due(posterior.mean, x)
    with classifier.naming_batch(x):
        first = Rows.at_mean(classifier, posterior, batches.take(x, slice(0, 1)), n_gradients)
    if due:
        require_understood(classifier.at(posterior.mean), first.sites, x)
    logits = first.start.logits
    row_bytes = first.dtype.itemsize * _scalars_per_row(first, n_gradients, recorded)
    allowed = memory or default_budget(logits.device, MOST if recorded else MOST_UNRECORDED)
    affordable = allowed // row_bytes
    n_labels, most = max(1, affordable), max(1, affordable // logits.shape[-1])
    # Chunks of equal size: a small last chunk takes longer per input.
    n_chunks = max(1, math.ceil(batches.size(x) / most))
    n_inputs = max(1, math.ceil(batches.size(x) / n_chunks))
    for index, chunk in enumerate(batches.chunks(x, n_inputs)):
        rows = first  # of a single input, which need not run again
        if batches.size(x) > 1:
            rows = Rows.at_mean(classifier, posterior, chunk, n_gradients)
        remedy = "check the model and these inputs"
        with checks.counting_from(index * n_inputs, batches.size(x)):
            checks.require_finite(rows.start.logits[:, 0], "the model's logits are", remedy)
        yield rows, n_labels


def label_chunks(rows: Rows, n_labels: int) -> tuple[Tensor, ...]:
    """Return all labels, at most `n_labels` at a time."""
    logits = rows.start.logits
    return torch.arange(logits.shape[-1], device=logits.device).split(int(n_labels))


def solved_at(rows: Rows, path: Path, labels: Tensor, with_residuals: bool) -> Solved:
    """Evaluate the true network at the end of a path."""
    if not with_residuals:
        return Solved(rows.log_lik(rows.logits(path, len(labels)), labels), _not_recorded)
    tape = rows.recorded(path, len(labels))

    def residual() -> Tensor:
        gradient = rows.log_lik_gradient(tape, labels)
        return rows.residual(gradient.plus(path.v().scaled(-1)))

    return Solved(rows.log_lik(tape.logits, labels), residual)


def _not_recorded() -> Tensor:
    raise AssertionError("residuals were not asked for")


def _scalars_per_row(rows: Rows, n_gradients: int, recorded: bool) -> int:
    """Estimate the numbers that one row keeps in memory."""
    classes = rows.start.logits.shape[-1]
    newton = COPIES * classes  # its share of the matrices of an input
    sizes = [_Size.of(rows, site) for site in rows.start.passages]
    if recorded:
        own = sum(_if_recorded(size, n_gradients, classes) for size in sizes)
        return max(newton + own, 1)
    dense = sum(COPIES_OF_DELTAS * s.outs + COPIES_OF_WEIGHTS * s.weights for s in sizes)
    factors = sum(COPIES_OF_FACTORS * s.outs for s in sizes if not s.weights)
    by_input = sum(COPIES_OF_DELTAS * (s.ins + s.outs) for s in sizes) // classes
    widest = max(COPIES_OF_WIDEST * (s.ins + s.outs) for s in sizes)
    return max(newton + dense + factors + by_input + widest, 1)


class _Size(NamedTuple):
    """Numbers of a row in one layer."""

    ins: int  # inputs, as vectors where they are needed as such
    outs: int
    weights: int  # in the parameters, or 0 where gradients are kept in factors
    positions: int

    @staticmethod
    def of(rows: Rows, site: Site) -> _Size:
        """Look at the pass at the mean."""
        passed = rows.start.passages[site]
        sizes = [(one.received if one.inputs is None else one.inputs.vectors) for one in passed]
        ins, outs = sum(t.numel() for t in sizes), sum(one.output.numel() for one in passed)
        if site not in rows.factored:
            shapes = (rows.posterior.mean[name].shape for name in site.layer.names)
            return _Size(ins, outs, sum(math.prod(shape) for shape in shapes), 0)
        positions = sum(t.shape[-2] for t in sizes)
        return _Size(ins, outs, 0, positions)


def _if_recorded(size: _Size, n_gradients: int, classes: int) -> int:
    total = COPIES * (size.ins + size.outs)
    if size.weights:
        return total + (COPIES + n_gradients) * size.weights
    total += COPIES_OF_GRADIENTS * n_gradients * (size.ins + size.outs)
    return total + (size.positions * size.outs // classes if size.positions > 1 else 0)
