"""Choose alpha, prior precision and temperature on a held-out validation set.

Every search returns a `Choice`: the value, the table of all values that were tried, and the rule.
Print it to see all three. There are two ways to choose any knob of a predictor: `least_nll` takes
the best value of a grid, and `within_price` the largest value that increases the NLL by at most a
given price. `Acnml` predictors that differ only in α share one pass over the data.

The paper names three rules for α, the weight of the query (appendix A): match the likelihoods of
CNML (`studies/paper_mnist` does); select by validation like a temperature (`least_nll`); take the
largest α that does not degrade accuracy and NLL, which it uses for its SWAG-D results. For NLL,
that is `within_price`. α → 0 is the network itself, called MAP here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._util import checks
from acnml._util.batches import NO_LABELS, Inputs, as_loader, each_batch, split_labels
from acnml._util.params import flatten
from acnml.calibration.search import LARGEST, largest_at_price, least_nll_temperature, zero_of
from acnml.calibration.table import as_html, as_text
from acnml.fit import Curvature
from acnml.fit.batches import checked_labels, require_classes
from acnml.predictors import Acnml, Predictor
from acnml.predictors.base import require_predictor
from acnml.problem import Problem
from acnml.solution import UnsolvedError

# A function from the value of a hyperparameter to the predictor with this value.
MakePredictor: TypeAlias = Callable[[float], Predictor]

PAPERS_ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0)

ROUNDING = 1e-9  # so that a score that is equal to its limit is accepted
PRIOR_PRECISIONS = (1e-8, 1e8)  # beyond these, the evidence has no maximum

# Numbers in the covariances of the logits that are kept from one α to the next.
MOST_KEPT = 2**25


class Scores(NamedTuple):
    """Scores of a predictor on the validation data: a row of the table of a `Choice`.

    >>> from acnml.tuning import Scores
    >>> Scores._fields
    ('value', 'accuracy', 'nll', 'brier', 'ece')
    """

    value: float  # of the hyperparameter
    accuracy: float
    nll: float
    brier: float
    ece: float


class Evidence(NamedTuple):
    """A prior precision and its log marginal likelihood, up to a constant.

    >>> from acnml.tuning import Evidence
    >>> Evidence(value=0.1, log_evidence=-12.0).value
    0.1
    """

    value: float
    log_evidence: float


T = TypeVar("T")


@final
@dataclass(frozen=True)
class Choice:
    """A chosen value, with the table of all values that were tried.

    >>> from acnml.tuning import Choice, Evidence
    >>> print(Choice(0.5, (Evidence(0.1, -12.0), Evidence(0.5, -9.5)), "the largest evidence"))
    0.5: the largest evidence
       value  log_evidence
         0.1      -12.0000
    →    0.5       -9.5000
    """

    value: float
    table: tuple[Any, ...]  # of `Scores` or `Evidence`
    rule: str  # a description of how the value was chosen

    def __str__(self) -> str:
        return f"{self.value:.6g}: {self.rule}\n{_text(self.table, self.value)}"

    def _repr_html_(self) -> str:
        """Return the table for notebooks, with the chosen row in bold."""
        chosen = [row.value == self.value for row in self.table]
        rows = [_cells(row) for row in self.table]
        return as_html(self.table[0]._fields, rows, chosen, [f"{self.value:.6g}: {self.rule}"])


def _text(table: Sequence[Any], chosen: float | None = None) -> str:
    """Format a table, with an arrow before the chosen row if there is one."""
    rows = [["→" if row.value == chosen else "", *_cells(row)] for row in table]
    return as_text([["", *table[0]._fields], *rows])


def _cells(row: Scores | Evidence) -> list[str]:
    return [f"{row.value:.6g}", *(f"{number:.4f}" for number in row[1:])]


# Any knob ----------------------------------------------------------------------------------------


def sweep(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    progress: bool | None = None,
) -> tuple[Scores, ...]:
    """Return the scores for every value in the grid.

    `Acnml` predictors that differ only in α share one pass over the loader. All others take one
    pass for each value.

    Args:
        make_predictor: e.g. `lambda samples: Bma(classifier, posterior, int(samples))`.
        grid: the values to try.
        loader: validation data, with labels.
        progress: whether to show progress bars; by default only in a terminal.

    >>> x, labels = torch.randn(50, 3), torch.arange(50) % 3
    >>> plain = acnml.Map(acnml.Classifier(torch.nn.Linear(3, 3)))
    >>> table = acnml.tuning.sweep(lambda T: acnml.Tempered(plain, T), (1.0, 2.0), (x, labels))
    >>> [row.value for row in table]
    [1.0, 2.0]
    """
    validation = _Validation(loader, progress)
    return tuple(validation.scores(value, make_predictor(value)) for value in grid)


def least_nll(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    progress: bool | None = None,
) -> Choice:
    """Return the value in the grid with the lowest validation NLL.

    It applies to any hyperparameter. On in-distribution data, the best α is often the smallest of
    the grid: see `within_price`. For the arguments see `sweep`.

    >>> plain, x = acnml.Map(acnml.Classifier(torch.nn.Linear(3, 3))), torch.randn(50, 3)
    >>> data = x, plain(x).argmax(1)
    >>> acnml.tuning.least_nll(lambda T: acnml.Tempered(plain, T), (0.1, 1.0), data).value
    0.1
    """
    table = sweep(make_predictor, grid, loader, progress)
    best = min(table, key=lambda row: row.nll)
    return Choice(best.value, table, "the value of least validation NLL")


def within_price(
    make_predictor: MakePredictor,
    loader: Iterable[Any],
    price: float,
    reference: Predictor,
    start: float = 1.0,
    progress: bool | None = None,
) -> Choice:
    """Return the largest value whose validation NLL is at most `price` above a reference.

    A larger value lowers the confidence on all inputs. The price, in nats, limits the resulting
    increase of the NLL on in-distribution data. The value costs between 99.5 % of the price and all
    of it. It can cost less if the NLL jumps, or if larger values have no solution.

    Args:
        make_predictor: a function from a value to the predictor, which is more cautious for larger
            values, and whose effect vanishes towards 0: α, the inverse of a prior precision, or c
            for the temperature T(1 + c).
        loader: validation data, with labels; see `sweep` for the number of passes.
        price: the acceptable increase of the NLL in nats, not negative.
        reference: the predictor to compare with.
        start: the value to try first.
        progress: whether to show progress bars; by default only in a terminal.

    >>> posterior = acnml.fit_laplace(classifier, x)
    >>> choice = acnml.tuning.within_price(
    ...     lambda alpha: acnml.Acnml(classifier, posterior, alpha=alpha),
    ...     loader=(x, classifier.logits(x).argmax(1)),
    ...     price=0.01,
    ...     reference=acnml.Map(classifier),
    ... )
    >>> predict = acnml.Acnml(classifier, posterior, alpha=choice.value)
    """
    if not 0 <= price < math.inf:
        raise ValueError(f"price must be finite and not negative, got {price}")
    checks.require_positive(start, "start")
    validation, rows = _Validation(loader, progress), list[Scores]()
    plain = metrics.nll(*validation.predictions(reference, "reference"))

    def cost(value: float) -> float:
        try:
            rows.append(validation.scores(value, make_predictor(value)))
        except UnsolvedError:  # more cautious values make the problems of ACNML harder
            return math.inf
        return rows[-1].nll - plain

    chosen = largest_at_price(cost, price + ROUNDING, start)
    meaning = f"within {price:g} nats of the reference NLL {plain:.4f}"
    table = tuple(sorted(set(rows)))
    if chosen == LARGEST:
        raise ValueError(
            f"every value is {meaning}: lower the price, and check that larger values are more "
            f"cautious\n{_text(table)}"
        )
    if not any(row.value == chosen and row.nll - plain <= price + ROUNDING for row in rows):
        tried = _text(table) if table else "The solver found no solution for any value."
        raise ValueError(f"no value is {meaning}: raise the price\n{tried}")
    return Choice(chosen, table, f"the largest value {meaning}")


class _Known(NamedTuple):
    """The problem of all data for a predictor, whatever its α; None if it has too many numbers."""

    predictor: Acnml
    problem: Problem | None
    labels: Tensor

    def serves(self, other: Acnml) -> bool:
        """Whether another predictor has the same problem."""
        same = other.posterior is self.predictor.posterior
        return same and other.classifier.agrees_with(self.predictor.classifier)


@final
class _Validation:
    """Labelled data, which are read once for all α of a predictor."""

    def __init__(self, loader: Iterable[Any], progress: bool | None) -> None:
        self._loader, self._progress = as_loader(loader), progress
        self._known: _Known | None = None

    def scores(self, value: float, predictor: Predictor) -> Scores:
        """Return a row of a table."""
        return Scores(value, **metrics.summary(*self.predictions(predictor, f"{value:g}")))

    def predictions(self, predictor: Predictor, description: str) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (N, K) and labels (N,) of all data, on the CPU."""
        if isinstance(predictor, Acnml) and predictor.logit_solver is not None:
            known = self._known
            if known is None or not known.serves(predictor):
                known = self._known = self._problem(predictor)
            if known.problem is not None:
                return predictor.solve_problem(known.problem).log_probs.cpu(), known.labels
        parts, labels = self._over_data(lambda x: predictor(x).cpu(), description)
        return torch.cat(parts), labels

    def _problem(self, predictor: Acnml) -> _Known:
        """Return the logits of all data and their covariance."""
        left = MOST_KEPT

        def look(x: Inputs) -> Problem | None:
            nonlocal left
            found = predictor.problem(x) if left >= 0 else None
            left -= 0 if found is None else found.logits.shape[1] * found.logits.numel()
            return found

        parts, labels = self._over_data(look, "logits")
        found = [part for part in parts if part is not None]
        return _Known(predictor, Problem.joined(found) if left >= 0 else None, labels)

    def _over_data(
        self, compute: Callable[[Inputs], T], description: str
    ) -> tuple[list[T], Tensor]:
        """Return the results of all batches, and their labels. Errors name the batch."""
        results, labels = list[T](), list[Tensor]()

        def use(batch: Any) -> None:
            x, given = split_labels(batch)
            if given is None:
                raise ValueError(NO_LABELS)
            own, result = checked_labels(given, x), compute(x)
            if result is not None:
                logits: Any = getattr(result, "logits", result)
                require_classes(own, logits)
            labels.append(own.cpu())
            results.append(result)

        each_batch(self._loader, use, description, self._progress)
        return results, torch.cat(labels)


# Temperature -------------------------------------------------------------------------------------


@torch.inference_mode(False)
def temperature_by_nll(
    predictor: Predictor, loader: Iterable[Any], progress: bool | None = None
) -> Choice:
    """Return the temperature with the lowest validation NLL (Guo et al. 2017).

    It minimises -1/N Σ log softmax(log p(·|x) / T)_y, which is convex in 1/T, so there is only one
    minimum. Use the result as `Tempered(predictor, T)`. If it was chosen for `Map(classifier)`, it
    can also be used as `classifier.tempered(T)`. Other predictors and fits then use the tempered
    likelihood.

    Args:
        predictor: the predictor to calibrate.
        loader: validation data, with labels. One pass is made.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> plain = acnml.Map(acnml.Classifier(torch.nn.Identity()))
    >>> x = torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> choice = acnml.tuning.temperature_by_nll(plain, (x, torch.tensor([0, 0, 1])))
    >>> round(choice.value, 3)  # softmax([3/T, 0]) = [2/3, 1/3]
    4.328
    """
    require_predictor(predictor)
    log_probs, labels = _Validation(loader, progress).predictions(predictor, "temperature")
    checks.require_finite(
        log_probs, "log-probabilities are", "use a predictor whose probabilities are not zero"
    )
    best = least_nll_temperature(log_probs, labels)
    table = []
    for value in sorted({1.0, best}):
        tempered = torch.log_softmax(log_probs.double() / value, dim=-1)
        table.append(Scores(value, **metrics.summary(tempered, labels)))
    rule = "the temperature of least validation NLL; 1 changes nothing"
    return Choice(best, tuple(table), rule)


# Prior precision ---------------------------------------------------------------------------------


def prior_precision_by_evidence(curvature: Curvature) -> Choice:
    """Return the τ that maximises the Laplace approximation of the marginal likelihood.

    This needs no data. With the eigenvalues h_i of the curvature, the derivative of the log
    evidence with respect to log τ is ½ (Σ_i h_i / (h_i + τ) - τ‖θ̂‖²). It decreases in τ, so there
    is only one maximum.

    Args:
        curvature: from `fit_curvature`.

    >>> curvature = acnml.fit.fit_curvature(classifier, torch.randn(500, 4))
    >>> choice = acnml.tuning.prior_precision_by_evidence(curvature)
    >>> posterior = curvature.posterior(choice.value)
    """
    eigenvalues = curvature.eigenvalues().double()
    square = float(flatten(curvature.mean, curvature.mean).double().square().sum())
    found: dict[float, float] = {}

    def slope(tau: float) -> tuple[float, float]:
        found[tau] = curvature.log_evidence(tau)
        shares = eigenvalues / (eigenvalues + tau)
        falling = (shares * (1 - shares)).sum() + tau * square
        return float(shares.sum()) - tau * square, float(falling)

    low, high = PRIOR_PRECISIONS
    reached = zero_of(slope)
    if not low < reached < high:
        raise ValueError(
            f"the evidence is still rising at a prior precision of {reached:.2g}: is the "
            "curvature, or the mean, zero?"
        )
    table = tuple(Evidence(*pair) for pair in sorted(found.items()))
    best = max(table, key=lambda row: row.log_evidence)
    return Choice(best.value, table, "the prior precision of largest evidence")
