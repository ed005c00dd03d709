"""Linearised: solve the problem with the logits linear in the weights, then look at the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._algebra.kernels import Kernel
from acnml._algebra.newton import solve_logits
from acnml._engine import blocks
from acnml._engine.blocks import Solved
from acnml._engine.path import Path
from acnml._engine.rows import Rows
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.head.solve import Precision, solve_head
from acnml.posteriors import Posterior
from acnml.solvers.base import Solution, UnsolvedError
from acnml.solvers.gradient import ascend

# A residual, in posterior standard deviations, with which no solution can be called one.
UNSOLVED = 0.1


@final
@dataclass(frozen=True)
class Linearised:
    """Linearise, solve, then evaluate: one Jacobian, Newton steps in logit space, one pass.

    The true network is evaluated at the solution θ = μ + ΣJᵀu of the linearised problem. Where a
    posterior covers only a last Linear layer, the network is linear in it and the solution exact.

    Args:
        polish: gradient steps that start at the linearised solution; 0 takes it as it is.
        step_size: of those steps.
        tolerance: largest residual of the linearised problem, see `Solution`.
        newton_steps: but never more Newton steps than this.
        negligible: with more than 64 classes and a last-layer posterior, labels are not solved for
            that add this much to C(x) at most, all together, by a bound that `Solution` reports.
        memory: bytes that the rows solved at once may take; a share of what is free by default.
    """

    polish: int = 0
    step_size: float = 0.5
    tolerance: float = 1e-5
    newton_steps: int = 50
    negligible: float = 1e-3
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.polish < 0 or self.newton_steps < 1:
            raise ValueError(f"polish must be ≥ 0 and newton_steps ≥ 1, got {self}")
        checks.require_positive(self.step_size, "step_size")
        checks.require_positive(self.tolerance, "tolerance")
        if self.negligible < 0:
            raise ValueError(f"negligible must be ≥ 0, got {self.negligible}")

    @property
    def gradients(self) -> int:
        """How many gradients a row's v is a sum of."""
        return 1 + self.polish

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""
        return "lower alpha, or use a narrower posterior"

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        return blocks.solution(self, classifier, posterior, x)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution, without a last gradient for residuals."""
        return blocks.log_lik(self, classifier, posterior, x)

    def solve(self, rows: Rows, at_once: int) -> Iterator[Solved]:
        """Solve for all labels of a block of inputs, so many labels at once."""
        logits = rows.start.logits[:, 0].detach()
        # In double precision: large kernels leave nothing of single precision's digits.
        kernel = rows.kernel().double()
        if rows.is_linear():
            yield self._exact(logits, kernel, at_once)
            return
        for labels in blocks.some_labels(rows, at_once):
            found = solve_logits(logits.double(), kernel, labels, self.tolerance, self.newton_steps)
            self._require_solved(found.residual)
            path = Path.along(rows.tangent, found.coefficients.to(rows.posterior.dtype))
            yield ascend(rows, path, labels, self.polish, self.step_size)

    def _exact(self, logits: Tensor, kernel: Kernel, at_once: int) -> Solved:
        """Solve for a last layer, in which the network is linear."""
        precision = Precision(self.tolerance, self.newton_steps, self.negligible)
        found = solve_head(logits.double(), kernel, precision, at_once)
        self._require_solved(found.residual[found.omitted == 0])
        wide = torch.promote_types(logits.dtype, torch.float32)
        return Solved(
            found.log_lik.to(wide), lambda: found.residual.to(wide), found.omitted.to(wide)
        )

    def _require_solved(self, residual: Tensor) -> None:
        """Refuse to go on from rows that Newton left far from the optimum."""
        if bool((residual > max(UNSOLVED, self.tolerance)).any()):
            raise UnsolvedError(
                f"the linearised problem is not solved after {self.newton_steps} Newton steps: a "
                f"residual of {residual.max().item():.2g} is left; {self.remedy}"
            )
