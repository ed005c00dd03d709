"""Linearised: solve the problem with the logits linear in the weights, then look at the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._algebra.newton import solve_logits
from acnml._engine import chunks
from acnml._engine.chunks import Solved, label_chunks, solved_at
from acnml._engine.rows import Path, Rows
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.head.features import Features, features, only_linear
from acnml.head.solve import Precision, solve_head
from acnml.posteriors import Posterior
from acnml.solvers.base import Solution, UnsolvedError

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
    tolerance: float = 1e-6
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
    def n_gradients(self) -> int:
        """The number of gradients that a row's v is a sum of."""
        return 1 + self.polish

    @property
    def remedy(self) -> str:
        """What to do when the solution is not finite."""
        return "lower alpha, or use a narrower posterior"

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        found = self._last_layer(classifier, posterior, x)
        return found or chunks.solution(self, classifier, posterior, x)

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution, without a last gradient for residuals."""
        found = self._last_layer(classifier, posterior, x)
        return found.log_lik if found else chunks.log_lik(self, classifier, posterior, x)

    def solve(self, rows: Rows, n_labels: int) -> Iterator[Solved]:
        """Solve for all labels of a chunk of inputs, at most `n_labels` at a time."""
        logits = rows.start.logits[:, 0].detach().double()
        # In double precision: large kernels need more digits than single precision has.
        kernel = rows.kernel().double()
        for labels in label_chunks(rows, n_labels):
            found = solve_logits(logits, kernel, labels, self.tolerance, self.newton_steps)
            self._require_solved(found.residual)
            path = Path.along(rows.tangent, found.coefficients.to(rows.posterior.dtype))
            path = rows.ascended(path, labels, self.polish, self.step_size)
            yield solved_at(rows, path, labels)

    def _last_layer(
        self, classifier: Classifier, posterior: Posterior, x: Inputs
    ) -> Solution | None:
        """Solve in logit space if the posterior covers the last layer alone, else return None."""
        layer = only_linear(classifier, posterior.mean)
        found = None if layer is None else features(classifier, layer, x, posterior.mean)
        if layer is None or found is None:
            return None
        return self.solve_features(found, posterior, layer.layer, classifier.temperature)

    def solve_features(
        self,
        found: Features,
        posterior: Posterior,
        layer: Affine,
        temperature: float,
        scale: Tensor | None = None,
    ) -> Solution:
        """Solve for every label of inputs with known features of the last layer.

        The scale (B,) multiplies the posterior's covariance, for every input by its own number.
        """
        kernel = posterior.output_kernel(layer, found.inputs.to(posterior.dtype))
        kernel = kernel.scaled(temperature**-2).double()
        kernel = kernel if scale is None else kernel.scaled(scale.double())
        precision = Precision(self.tolerance, self.newton_steps, self.negligible)
        # A row needs some twenty vectors of K numbers in double precision.
        rows = None if self.memory is None else max(1, self.memory // (160 * found.logits.shape[1]))
        solved = solve_head(found.logits.double(), kernel, precision, rows)
        self._require_solved(solved.residual[solved.omitted == 0])
        wide = torch.promote_types(found.logits.dtype, torch.float32)
        return Solution(*(tensor.to(wide) for tensor in solved))

    def _require_solved(self, residual: Tensor) -> None:
        """Refuse to go on from rows that Newton left far from the optimum."""
        if bool((residual > max(UNSOLVED, self.tolerance)).any()):
            raise UnsolvedError(
                f"the linearised problem is not solved after {self.newton_steps} Newton steps: a "
                f"residual of {residual.max().item():.2g} is left; {self.remedy}"
            )
