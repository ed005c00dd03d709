"""Acnml: amortized conditional normalized maximum likelihood."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast, final, get_args, get_type_hints

import torch
from torch import Tensor

from acnml._util import batches, checks
from acnml._util.batches import Inputs, arrays_for_arrays, in_chunks
from acnml._util.checks import RowsError
from acnml._util.messages import callers_level
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.predictors.base import NmlPredictor, matched
from acnml.problem import LogitSolver, Problem, of_problems, problems, solutions
from acnml.solution import UNSOLVED, Solution, UnsolvedError, UnsolvedWarning
from acnml.solve.base import Solver
from acnml.solve.linearised import Linearised

DEFAULT = Linearised()


@final
@dataclass(frozen=True, eq=False)
class Acnml(NmlPredictor):
    """p(y|x) ∝ p_θ̂_y(y|x) with θ̂_y = argmax_θ α log p_θ(y|x) + log q(θ) (Zhou & Levine 2021).

    Args:
        classifier: the model.
        posterior: q, fitted once on the training data.
        solver: how θ̂_y is found. By default the network is linearised in the weights that the
            posterior covers, see `Linearised`: this is solved exactly, at the price of one
            Jacobian, or of one forward pass for a last layer.
        alpha: α, the weight of the query. Larger is more cautious, and α → 0 is the model at the
            mean. Always choose it on validation data (`acnml.calibrate`, `acnml.tuning`): at the
            default of 1 a Laplace posterior is often so wide that every label can be explained,
            and the predictions are useless.
        on_unsolved: what to do about labels whose solution is not close to an optimum (see
            `Solution.solved`), which happens with other solvers than the default. "warn" answers
            with an `UnsolvedWarning` that counts them, "raise" raises an `UnsolvedError` that names
            the inputs, and "ignore" answers without the last gradient, which would tell.
        on_error: what to do about inputs without an answer: they or their logits are not finite,
            or the solver diverges. "raise" raises an error that names them. "flag" answers for
            the others and returns NaN for these, see `Solution.failed`.

    >>> predict = acnml.Acnml(classifier, posterior, alpha=0.1)
    >>> predict(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    classifier: Classifier
    posterior: Posterior
    solver: Solver = DEFAULT
    alpha: float = 1.0
    on_unsolved: Literal["warn", "raise", "ignore"] = "warn"
    on_error: Literal["raise", "flag"] = "raise"

    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        checks.require_positive(self.alpha, "alpha")
        for name in ("on_unsolved", "on_error"):
            allowed = get_args(get_type_hints(Acnml)[name])
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if isinstance(self.solver, type) or not hasattr(self.solver, "log_lik"):
            raise TypeError(f"solver must be a solver such as Linearised(), got {self.solver!r}")
        object.__setattr__(self, "posterior", matched(self.posterior, self.classifier))

    @property
    def at_mean(self) -> Classifier:
        """The network at the posterior's mean."""
        return self.classifier.at(self.posterior.mean)

    @property
    def logit_solver(self) -> LogitSolver | None:
        """The solver, if the logits of an input and their covariance are all that it needs."""
        takes_problem = getattr(self.solver, "takes_problem", False)
        return cast(LogitSolver, self.solver) if takes_problem else None

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def problem(self, x: Inputs) -> Problem:
        """Return the logits and their covariance for α = 1, which serve every α and any rule."""
        return Problem.joined(of_problems(self.classifier, self.posterior, x, lambda part: part))

    @torch.inference_mode(False)
    @torch.no_grad()
    def solve_problem(self, problem: Problem) -> Solution:
        """Solve the problem of some inputs, from `problem`, at this predictor's α."""
        assert self.logit_solver is not None
        return self.logit_solver.of(problem.scaled(self.alpha))

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def solve(self, x: Inputs) -> Solution:
        """Return `log_probs` and `regret` in one go, and how far they are from an optimum."""
        solution = self._in_chunks(x, self._solved)
        if self.on_unsolved != "ignore":
            self._report(~solution.solved & ~solution.log_lik.isnan(), solution.residual)
        return solution

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def log_lik(self, x: Inputs) -> Tensor:
        """Return log p_θ̂_y(y|x) before it is normalised (B, K): how well each y is explained."""
        if self.on_unsolved != "ignore" or self.logit_solver is not None:
            return self.solve(x).log_lik
        return self._in_chunks(x, self._without_residuals).log_lik

    def _in_chunks(self, x: Inputs, solve: Callable[[Inputs], Solution]) -> Solution:
        """Solve for a chunk of inputs at a time."""

        def prepared(some: Inputs) -> Solution:
            use, within = partial(self._flagged, use=solve), self.classifier.threads_for
            return Solution.joined(in_chunks(self.classifier.prepare(some), use, within=within))

        return self._flagged(x, prepared)

    def _flagged(self, x: Inputs, use: Callable[[Inputs], Solution]) -> Solution:
        """Use a batch; if its inputs that raise an error are to be flagged, they become NaN."""
        try:
            return use(x)
        except RowsError as error:
            if self.on_error == "raise" or not error.rows:
                raise
            bad = list(error.rows)
        good = torch.ones(batches.size(x), dtype=torch.bool, device="cpu")
        good[bad] = False
        if not bool(good.any()):
            return _nowhere(self.classifier, x)
        return _spread(self._flagged(batches.take(x, good.nonzero()[:, 0]), use), good)

    def _solved(self, x: Inputs) -> Solution:
        """Solve for a prepared batch."""
        if self.logit_solver is None:
            return self.solver(self.classifier, self.posterior.scaled(self.alpha), x)
        parts = problems(self.classifier, self.posterior, x, self.logit_solver.memory)
        return solutions(parts, self.solve_problem, batches.size(x))

    def _without_residuals(self, x: Inputs) -> Solution:
        """Solve for a prepared batch, without the gradient that tells how good a solution is."""
        log_lik = self.solver.log_lik(self.classifier, self.posterior.scaled(self.alpha), x)
        return _unknown(log_lik)._replace(log_lik=log_lik)

    def _report(self, unsolved: Tensor, residual: Tensor) -> None:
        """Warn of unsolved labels (B, K), or raise an error."""
        inputs = unsolved.any(1)
        if not bool(inputs.any()):
            return
        what = (
            f"{int(unsolved.sum())} of {unsolved.numel()} labels are not solved (the largest "
            f"residual is {residual[unsolved].max().item():.2g}, the limit {UNSOLVED})"
        )
        remedy = (
            "their probabilities are inaccurate. The default solver, Linearised(), solves every "
            "label. With another one, lower alpha, take more steps, or accept this with "
            'on_unsolved="ignore". `solve` says which labels are solved'
        )
        error = UnsolvedError(what, inputs.nonzero().flatten().tolist(), len(inputs), remedy)
        if self.on_unsolved == "raise":
            raise error
        warnings.warn(str(error), UnsolvedWarning, stacklevel=callers_level())


def _unknown(log_lik: Tensor) -> Solution:
    """Return a solution of this shape that says nothing."""
    unknown = torch.full_like(log_lik, torch.nan)
    return Solution(unknown, unknown)


def _spread(some: Solution, rows: Tensor) -> Solution:
    """Return a solution whose chosen rows (B,) are the given ones; the others are unknown."""
    whole = _unknown(some.log_lik.new_empty(len(rows), some.log_lik.shape[1]))
    index = rows.nonzero()[:, 0].to(some.log_lik.device)
    return Solution(*(a.index_put((index,), b) for a, b in zip(whole, some, strict=True)))


def _nowhere(classifier: Classifier, x: Inputs) -> Solution:
    """Return the solution of a batch without any input that has one."""
    harmless = batches.map_inputs(x, lambda tensor: torch.zeros_like(tensor[:1]))
    logits = classifier.logits(classifier.prepare(harmless))
    wide = torch.promote_types(logits.dtype, torch.float32)
    return _unknown(logits.expand(batches.size(x), -1).to(wide))
