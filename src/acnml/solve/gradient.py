"""Gradient: the paper's iteration, exactly, without a copy of the weights per label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from acnml._algebra.dual import Dual
from acnml._engine.rows import Rows
from acnml._util import checks
from acnml._util.memory import require_memory
from acnml.solve.base import RowSolver, Solved


@final
@dataclass(frozen=True)
class Gradient(RowSolver):
    """The iteration of `Reference`, with all rows in shared matrix products.

    In the dual form θ = μ + Σv the update reads v ← (1 - ε)v + ε ∇log p_θ(y|x): v is a weighted sum
    of gradients, which are outer products and stay so. The iterates are the paper's, whatever they
    do to the objective: check `Solution.solved`.

    Args:
        steps: number of updates. The paper uses 5, and 10 for KFAC posteriors.
        step_size: ε. The paper uses 0.5, and 0.25 for KFAC posteriors.
        memory: bytes that the rows solved at once may take; by default a share of what is free.

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
    def n_gradients(self) -> int:  # type: ignore[override]
        """The number of gradients that a row's v is a sum of."""
        return self.steps

    @property
    def remedy(self) -> str:  # type: ignore[override]
        """What to do when the solution is not finite."""
        return f"the iteration diverged: lower step_size ({self.step_size}) or alpha"

    def records(self, with_residuals: bool) -> bool:
        """Whether rows are run with a graph: all steps but the first are."""
        return with_residuals or self.steps > 1

    def solve(self, rows: Rows, labels: Sequence[Tensor], with_residuals: bool) -> Iterator[Solved]:
        """Solve for some labels at a time."""
        for some in labels:
            gradient = rows.pulled(rows.logit_gradient(rows.start.logits, some))
            if self.steps == 0:
                at_mean = rows.log_lik(rows.start.logits, some)
                yield Solved(at_mean, rows.residual(gradient) if with_residuals else None)
                continue
            v = gradient.scaled(self.step_size)
            v = ascended(rows, v, some, self.steps - 1, self.step_size)
            if not with_residuals:
                yield Solved(rows.log_lik(rows.logits(v, len(some)), some), None)
                continue
            tape = rows.recorded(v, len(some))
            gradient = Dual.total([rows.log_lik_gradient(tape, some), v.scaled(-1)])
            yield Solved(rows.log_lik(tape.logits, some), rows.residual(gradient))


def ascended(rows: Rows, v: Dual, labels: Tensor, steps: int, size: float) -> Dual:
    """Take steps of the paper's iteration, v ← (1 - ε)v + ε ∇log p_θ(y|x)."""
    for _ in range(steps):
        gradient = rows.log_lik_gradient(rows.recorded(v, len(labels)), labels)
        v = Dual.total([v.scaled(1 - size), gradient.scaled(size)])
    return v
