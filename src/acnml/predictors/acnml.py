"""Acnml: amortized conditional normalized maximum likelihood."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast, final, get_args, get_type_hints

import torch
from torch import Tensor

from acnml._engine.recorder import Site
from acnml._util import batches, checks
from acnml._util.batches import Inputs, arrays_for_arrays, in_chunks
from acnml._util.checks import RowsError
from acnml._util.messages import callers_level
from acnml._util.params import Params
from acnml.classifier import Classifier
from acnml.posteriors.base import Posterior
from acnml.predictors.base import NmlPredictor, matched
from acnml.problem import (
    Features,
    LogitSolver,
    Problem,
    all_features,
    each_solved,
    joined,
    of_features,
    only_linear,
    problems,
)
from acnml.solution import UNSOLVED, Solution, UnsolvedError, UnsolvedWarning
from acnml.solve.base import Solver
from acnml.solve.linearised import Linearised

T = TypeVar("T")

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
        on_unsolved: what to do about labels whose solution is not close to an optimum (`solved` of
            a `Solution` is False). This happens with other solvers than the default. "warn" answers
            with an `UnsolvedWarning` that counts them. "raise" raises an `UnsolvedError` that names
            the inputs. "ignore" answers; predictions then skip the last gradient, which is what
            tells how good a solution is.
        on_error: what to do about inputs without an answer: they or their logits are not finite,
            or the solver diverges. "raise" raises an error that names them. "flag" answers for
            the others and returns NaN for these, see `Solution.failed`.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
    >>> predict = acnml.Acnml(classifier, posterior, alpha=0.1)
    >>> predict(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    >>> bool((predict.regret(torch.randn(5, 4)) >= 0).all())
    True
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

    def at(self, tensors: Params) -> Acnml:
        """View the same predictor with some tensors of its network replaced: `Classifier.at`."""
        return replace(self, classifier=self.classifier.at(tensors))

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
        prepared, within = self.classifier.prepare(x), self.classifier.threads_for

        def find(chunk: Inputs) -> list[Problem]:
            return [*problems(self.classifier, self.posterior, chunk)]

        parts = in_chunks(prepared, find, within=within)
        return Problem.joined([one for some in parts for one in some])

    @torch.inference_mode(False)
    @torch.no_grad()
    def solve_problem(self, problem: Problem) -> Solution:
        """Solve the problem of some inputs, from `problem`, at this predictor's α."""
        assert self.logit_solver is not None
        return self.logit_solver.of(problem.scaled(self.alpha))

    @property
    def last_layer(self) -> Site | None:
        """The layer that the posterior covers, if it is one Linear layer solved in logit space."""
        solves = self.logit_solver is not None
        return only_linear(self.classifier, self.posterior.mean) if solves else None

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def features(self, x: Inputs) -> Features | None:
        """Return what the last layer receives and returns, or None if there is no such layer."""
        layer = self.last_layer
        if layer is None:
            return None
        x = self.classifier.prepare(x)
        return all_features(self.classifier, layer, x, self.posterior.mean)

    @torch.inference_mode(False)
    @torch.no_grad()
    def solve_features(self, features: Features) -> Solution:
        """Solve for inputs whose features are known, without running the network."""
        assert self.last_layer is not None
        layer, temperature = self.last_layer.layer, self.classifier.temperature
        parts = of_features(features, self.posterior, layer, temperature)
        return joined(each_solved(parts, self.solve_problem, len(features.logits)))

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
        if self.on_unsolved != "ignore":
            return self.solve(x).log_lik
        return self._in_chunks(x, self._unchecked).log_lik

    def _in_chunks(self, x: Inputs, solve: Callable[[Inputs], Solution]) -> Solution:
        """Solve for a chunk of inputs at a time; failed inputs raise an error or become NaN."""
        size, done = batches.size(x), 0
        prepared, usable = self._without_failures(
            x, torch.arange(size, device="cpu"), self.classifier.prepare
        )
        parts, rows = [], []
        for chunk in () if prepared is None else batches.chunks(prepared):
            own = usable[done : done + batches.size(chunk)]
            with checks.counting_from(done, size), self.classifier.threads_for(chunk):
                found, kept = self._without_failures(chunk, own, solve)
            done += len(own)
            if found is not None:
                parts.append(found)
                rows.append(kept)
        if not parts:
            return _nowhere(self.classifier, x)
        whole = joined(parts)
        return whole if len(whole.log_lik) == size else _spread(whole, torch.cat(rows), size)

    def _without_failures(
        self, x: Inputs, index: Tensor, use: Callable[[Inputs], T]
    ) -> tuple[T | None, Tensor]:
        """Use a batch, without its inputs that raise an error if these are to be flagged.

        Return the result, and which entries of `index` it is about.
        """
        kept = torch.arange(len(index), device="cpu")
        while len(kept):
            try:
                return use(x if len(kept) == len(index) else batches.take(x, kept)), index[kept]
            except RowsError as error:
                if self.on_error == "raise" or not error.rows:
                    raise
                good = torch.ones_like(kept, dtype=torch.bool)
                good[list(error.rows)] = False
                kept = kept[good]
        return None, index[kept]

    def _unchecked(self, x: Inputs) -> Solution:
        """Solve for a prepared batch, without residuals if they take another gradient."""
        if self.logit_solver is not None:
            return self._solved(x)
        log_lik = self.solver.log_lik(self.classifier, self.posterior.scaled(self.alpha), x)
        unknown = torch.full_like(log_lik, torch.nan)
        return Solution(log_lik, unknown, torch.zeros_like(log_lik, dtype=torch.bool))

    def _solved(self, x: Inputs) -> Solution:
        """Solve for a prepared batch."""
        if self.logit_solver is None:
            return self.solver(self.classifier, self.posterior.scaled(self.alpha), x)
        parts = problems(self.classifier, self.posterior, x, self.logit_solver.memory)
        return joined(each_solved(parts, self.solve_problem, batches.size(x)))

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


def _spread(some: Solution, rows: Tensor, size: int) -> Solution:
    """Return a solution of `size` rows that holds the given ones, with NaN (or False) elsewhere."""
    whole = []
    for tensor in some:
        nothing = False if tensor.dtype == torch.bool else torch.nan
        empty = tensor.new_full((size, *tensor.shape[1:]), nothing)
        whole.append(empty.index_put((rows.to(tensor.device),), tensor))
    return Solution(*whole)


def _nowhere(classifier: Classifier, x: Inputs) -> Solution:
    """Return the solution of a batch without any input that has one."""
    harmless = batches.map_inputs(x, lambda tensor: torch.zeros_like(tensor[:1]))
    logits = classifier.logits(classifier.prepare(harmless))
    unknown = torch.full_like(logits, torch.nan).to(torch.promote_types(logits.dtype, torch.float))
    solved = torch.zeros_like(unknown, dtype=torch.bool)
    none = Solution(unknown, unknown, solved)
    return Solution(*(tensor.expand(batches.size(x), -1) for tensor in none))
