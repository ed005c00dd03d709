"""Linearised: the network linearised in its weights, solved exactly for every label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from acnml._engine.rows import Rows
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import require_memory
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.problem import LogitSolver, Problem, exact_problems, problems, solutions
from acnml.solution import REMEDY, UNSOLVED, Solution, UnsolvedError
from acnml.solve.ascent import Ascent
from acnml.solve.base import RowSolver, Solved
from acnml.solve.logits import solve


@final
@dataclass(frozen=True)
class Linearised(LogitSolver):
    """Take the network as linear in its weights, f(μ) + J(θ - μ), and solve this exactly.

    The linearised network is evaluated, too. It takes one Jacobian, about 2(K - 1) + 1 forward
    passes for all layers and one for a last layer, in which every network is linear. The problem is
    concave, so every label is solved. A Laplace posterior is fitted to this linearisation, and
    predicts better with it than with the network itself (Immer et al. 2021).

    With `evaluate="network"` the network itself is run at the solution θ = μ + ΣJᵀu, or closer to
    the mean where the objective is lower there. Gradient steps on the objective log p_θ(y|x) +
    log q(θ) of the network may follow (`polish`). It is not concave: a label that counts as solved
    is stationary, and other maxima may be higher.

    Args:
        evaluate: "linearised", or "network" for the network itself at the displaced weights.
        polish: for the network, gradient steps at most. A step that does not raise the objective is
            taken back, and a shorter one follows.
        step_size: the first of those steps; later ones follow from how the objective changes.
        polish_tolerance: rows with this residual, see `Solution`, are not polished any further.
        tolerance: largest residual of the linearised problem.
        newton_steps: maximum number of Newton steps.
        memory: bytes that the inputs solved at once may take; a share of what is free by default.
            It changes answers by rounding errors only.

    >>> solution = acnml.Linearised()(classifier, posterior, torch.randn(5, 4))
    >>> bool(solution.solved.all())
    True
    """

    evaluate: Literal["linearised", "network"] = "linearised"
    polish: int = 0
    step_size: float = 0.5
    polish_tolerance: float = UNSOLVED / 2
    tolerance: float = 1e-6
    newton_steps: int = 50
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.evaluate not in ("linearised", "network"):
            raise ValueError(f'evaluate must be "linearised" or "network", got {self.evaluate!r}')
        if self.polish < 0 or self.newton_steps < 1:
            raise ValueError(f"polish must be ≥ 0 and newton_steps ≥ 1, got {self}")
        if self.polish > 0 and self.takes_problem:
            raise ValueError(
                "polish improves the network itself, but the linearised network is solved exactly: "
                'leave polish out, or add evaluate="network"'
            )
        checks.require_positive(self.step_size, "step_size")
        checks.require_positive(self.polish_tolerance, "polish_tolerance")
        checks.require_positive(self.tolerance, "tolerance")
        require_memory(self.memory)

    @property
    def takes_problem(self) -> bool:
        """Whether the linearised network is all that is evaluated."""
        return self.evaluate == "linearised"

    def of(self, problem: Problem) -> Solution:
        """Solve for every label of every input of a problem."""
        found = solve(problem.logits, problem.kernel, None, self.tolerance, self.newton_steps)
        self._require_solved(found.residual)
        return Solution(found.log_lik.to(problem.dtype), found.residual.to(problem.dtype))

    def _require_solved(self, residual: Tensor) -> None:
        """Refuse rows that Newton left far from the optimum of a problem that has one."""
        solved = residual <= UNSOLVED
        rows = (~solved).any(1).nonzero().flatten().tolist()
        if rows:
            raise UnsolvedError(
                f"the linearised problem is not solved after {self.newton_steps} Newton steps: a "
                f"residual of {residual[~solved].max().item():.2g} is left",
                rows,
                len(solved),
                REMEDY,
            )

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        parts = self._problems(classifier, posterior, x)
        if parts is None:
            return _Network(self)(classifier, posterior, x)
        return solutions(parts, self.of, batches.size(x))

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution, without a last gradient for residuals."""
        parts = self._problems(classifier, posterior, x)
        if parts is None:
            return _Network(self).log_lik(classifier, posterior, x)
        return solutions(parts, self.of, batches.size(x)).log_lik

    def _problems(
        self, classifier: Classifier, posterior: Posterior, x: Inputs
    ) -> Iterator[Problem] | None:
        """Return the problem in parts, or None if the network itself is to be evaluated."""
        make = problems if self.takes_problem else exact_problems
        return make(classifier, posterior, x, self.memory)


@final
class _Network(RowSolver):
    """The network itself at the solution of the linearised one, and an ascent from there."""

    remedy = REMEDY

    def __init__(self, settings: Linearised) -> None:
        self.memory, self.n_gradients = settings.memory, 1 + settings.polish
        self._precision = settings.tolerance, settings.newton_steps
        self._ascent = Ascent(settings.polish, settings.step_size, settings.polish_tolerance)

    def records(self, with_residuals: bool) -> bool:
        """Whether rows are run with a graph, for residuals or further steps."""
        return with_residuals or self._ascent.steps > 0

    def solve(self, rows: Rows, labels: Sequence[Tensor], with_residuals: bool) -> Iterator[Solved]:
        """Solve for some labels at a time."""
        problem = Problem.of(rows.start.logits[:, 0].detach(), rows.kernel())
        for some in labels:
            u = solve(problem.logits, problem.kernel, some, *self._precision).u
            yield Solved(*self._ascent.run(rows, some, u, problem.kernel, with_residuals))
