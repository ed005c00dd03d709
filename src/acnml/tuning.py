"""Choose alpha, prior precision and temperature on a held-out validation set.

Most functions return a `Choice`: the value, the table of all values that were tried, and the rule.
Print it to see all three. A value is more cautious than another if its predictions are less
confident: a larger α, a higher temperature, a smaller prior precision.

The paper names three rules for α, the weight of the query (appendix A): match the likelihoods of
CNML (`alpha_matching_cnml`); select by validation like a temperature (`alpha_by_nll`); take the
largest α that does not degrade accuracy and NLL (`largest_harmless_alpha`), which it uses for its
SWAG-D results. α → 0 is the network itself, called MAP here. For any other knob, `within_price`
chooses the most cautious value that increases the NLL by at most a given price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._engine.last_layer import Features
from acnml._util import checks
from acnml._util.batches import Inputs, as_inputs, as_tensor
from acnml._util.messages import track
from acnml.calibration.search import Tried, golden_section, least_nll_temperature, narrowed
from acnml.calibration.table import as_html
from acnml.fit import Curvature
from acnml.predictors import Acnml, Map, Predictor
from acnml.predictors.base import require_predictor
from acnml.predictors.validation import Validation
from acnml.solution import UnsolvedError

__all__ = [
    "ALPHAS",
    "PAPERS_ALPHAS",
    "PRIOR_PRECISIONS",
    "Choice",
    "Evidence",
    "Judged",
    "MakePredictor",
    "Match",
    "Scores",
    "Tolerance",
    "alpha_by_nll",
    "alpha_matching_cnml",
    "largest_harmless_alpha",
    "most_cautious",
    "prior_precision_by_evidence",
    "prior_precision_by_nll",
    "sweep",
    "temperature_by_nll",
    "within_price",
]

T = TypeVar("T")

# A function from the value of a hyperparameter to the predictor with this value.
MakePredictor: TypeAlias = Callable[[float], Predictor]

PAPERS_ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0)
# A wider grid than the paper's. With Laplace posteriors of overconfident networks, α = 1 is often
# far too cautious.
ALPHAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
PRIOR_PRECISIONS = tuple(10.0**exponent for exponent in range(-4, 7))

ROUNDING = 1e-9  # tolerance for rounding errors, so that an NLL equal to its limit is accepted
REFINEMENTS = 6  # maximum number of values to try between two values of the grid
SPENT = 0.98  # stop refining at a value that costs at least this fraction of the price
PRECISION = 1e-4  # of log τ in the search for the largest evidence


# Tables ------------------------------------------------------------------------------------------


class Row(Protocol):
    """A row of a table: a named tuple of numbers that begins with the hyperparameter's value."""

    @property
    def value(self) -> float:
        """The value of the hyperparameter."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


RowT = TypeVar("RowT", bound=Row)


@final
@dataclass(frozen=True)
class Choice(Generic[RowT]):
    """A chosen value, with the table of all values that were tried.

    >>> from acnml.tuning import Evidence
    >>> print(Choice(0.5, (Evidence(0.1, -12.0), Evidence(0.5, -9.5)), "the largest evidence"))
    0.5: the largest evidence
       value  log_evidence
         0.1      -12.0000
    →    0.5       -9.5000
    """

    value: float
    table: tuple[RowT, ...]
    rule: str  # a description of how the value was chosen

    def __str__(self) -> str:
        return f"{self.value:.6g}: {self.rule}\n{_text(self.table, self.value)}"

    def _repr_html_(self) -> str:
        """Return the table for notebooks, with the chosen row in bold."""
        head = list(self.table[0]._asdict())
        rows = [_cells(row) for row in self.table]
        chosen = [row.value == self.value for row in self.table]
        return as_html(head, rows, chosen, [f"{self.value:.6g}: {self.rule}"])


def _text(table: Sequence[Row], chosen: float | None = None) -> str:
    """Format an aligned table, with an arrow before the chosen row if there is one."""
    lines = [["", *table[0]._asdict()]]
    lines += [["→" if row.value == chosen else "", *_cells(row)] for row in table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cells(row: Row) -> list[str]:
    cells = [
        ("yes" if cell else "no") if isinstance(cell, bool) else f"{cell:.4f}"
        for name, cell in row._asdict().items()
        if name != "value"
    ]
    return [f"{row.value:.6g}", *cells]


class Scores(NamedTuple):
    """Scores of a predictor on the validation data.

    >>> from acnml.tuning import Scores
    >>> Scores._fields  # a row of the table of a `Choice`
    ('value', 'accuracy', 'nll', 'brier', 'ece')
    """

    value: float  # of the hyperparameter
    accuracy: float
    nll: float
    brier: float
    ece: float


class Judged(NamedTuple):
    """`Scores`, and whether accuracy and NLL are within the tolerance of those of MAP.

    >>> from acnml.tuning import Judged
    >>> Judged._fields  # a row of the table of `largest_harmless_alpha`
    ('value', 'accuracy', 'nll', 'brier', 'ece', 'harmless')
    """

    value: float
    accuracy: float
    nll: float
    brier: float
    ece: float
    harmless: bool


class Match(NamedTuple):
    """Differences between the likelihoods p_θ̂_y(y|x) of ACNML and of CNML.

    >>> from acnml.tuning import Match
    >>> Match._fields  # a row of the table of `alpha_matching_cnml`
    ('value', 'distance', 'excess')
    """

    value: float
    distance: float  # mean |ACNML - CNML|
    excess: float  # mean (ACNML - CNML); positive if alpha is too large on average


class Evidence(NamedTuple):
    """A prior precision and its log marginal likelihood, up to a constant.

    >>> from acnml.tuning import Evidence
    >>> Evidence(value=0.1, log_evidence=-12.0).value
    0.1
    """

    value: float
    log_evidence: float


def _score(value: float, log_probs: Tensor, labels: Tensor) -> Scores:
    return Scores(value, **metrics.summary(log_probs, labels))


# Any knob ----------------------------------------------------------------------------------------


def sweep(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    progress: bool | None = None,
) -> tuple[Scores, ...]:
    """Return the scores for every value in the grid.

    `Acnml` predictors that differ only in α, or in the posterior of the last layer, share one pass
    over the loader. All others take one pass for each value.

    Args:
        make_predictor: e.g. `lambda samples: Bma(classifier, posterior, int(samples))`.
        grid: the values to try.
        loader: validation data, with labels.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x, labels = torch.randn(50, 3), torch.arange(50) % 3
    >>> plain = acnml.Map(acnml.Classifier(torch.nn.Linear(3, 3)))
    >>> table = acnml.tuning.sweep(lambda T: acnml.Tempered(plain, T), (1.0, 2.0), (x, labels))
    >>> [row.value for row in table]
    [1.0, 2.0]
    """
    validation = Validation(loader, progress)
    return tuple(
        _score(value, *validation.predictions(make_predictor(value), f"{value:g}"))
        for value in grid
    )


def most_cautious(values: Sequence[float], nlls: Sequence[float], limit: float) -> float:
    """Return the most cautious value whose validation NLL is at most the limit.

    The result lies between the first value within the limit and the more cautious one before it.
    There, log NLL is interpolated linearly in the logarithm of the value. Methods that are compared
    at the same limit therefore have nearly the same NLL, whatever their grids. The result is
    rounded to four digits, so that it does not depend on rounding errors of a sum.

    Args:
        values: positive values of a hyperparameter, the most cautious first, in increasing or
            decreasing order.
        nlls: their NLLs; infinite if there is no solution for a value.
        limit: the highest acceptable NLL.

    Raises:
        ValueError: if the NLL of every value exceeds the limit.

    >>> most_cautious([1, 10, 100], [0.4, 0.1, 0.1], limit=0.2)
    3.162
    """
    values = _most_cautious_first(values)
    inside = next((i for i, nll in enumerate(nlls) if nll <= limit), None)
    if inside is None:
        raise ValueError(
            f"no value has an NLL of at most {limit:g} (the lowest is {min(nlls):g}); "
            "try less cautious values or raise the limit"
        )
    above, within = nlls[inside - 1], nlls[inside]
    if inside == 0 or math.isinf(above) or within <= 0:  # the logarithm cannot be interpolated
        return values[inside]
    share = math.log(above / limit) / math.log(above / within)
    low, high = sorted(values[inside - 1 : inside + 1])
    interpolated = values[inside - 1] * (values[inside] / values[inside - 1]) ** share
    return min(max(float(f"{interpolated:.4g}"), low), high)


def within_price(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    price: float,
    reference: Predictor | float,
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the most cautious value whose validation NLL is at most `price` above a reference.

    A more cautious value lowers the confidence on all inputs. The price, in nats, limits the
    resulting increase of the NLL on in-distribution data. It applies to any hyperparameter. For
    example, to choose α at a price of 0.01 nats over the network:

        within_price(
            lambda alpha: Acnml(classifier, posterior, alpha=alpha),
            sorted(tuning.ALPHAS, reverse=True), loader, price=0.01, reference=Map(classifier),
        )

    The values of the grid are tried first, from the least cautious to the first one for which the
    solver finds no solution. Then up to six values between the last value within the price and
    the first one above it are tried, as `acnml.calibrate` does. The chosen value is always one that
    was tried, and it is in the table.

    Args:
        make_predictor: a function from a value to the predictor.
        grid: the values to try, the most cautious first: decreasing for α and temperatures,
            increasing for prior precisions. The wrong order raises an error.
        loader: validation data, with labels; see `sweep` for the number of passes.
        price: the acceptable increase of the NLL in nats, not negative.
        reference: the predictor to compare with, or its validation NLL.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x, labels = torch.randn(50, 3), torch.arange(50) % 3
    >>> plain = acnml.Map(acnml.Classifier(torch.nn.Linear(3, 3)))
    >>> choice = acnml.tuning.within_price(
    ...     lambda temperature: acnml.Tempered(plain, temperature),
    ...     grid=(3.0, 2.0, 1.0),  # the most cautious first
    ...     loader=(x, labels),
    ...     price=0.01,
    ...     reference=plain,
    ... )
    >>> choice.value >= 1
    True
    """
    values = _most_cautious_first(grid)
    if not 0 <= price < math.inf:
        raise ValueError(f"price must be finite and not negative, got {price}")
    validation = Validation(loader, progress)
    rows: dict[float, Scores] = {}
    confidences: list[float] = []

    def nll(value: float) -> float:
        log_probs, labels = validation.predictions(make_predictor(value), f"{value:g}")
        rows[value] = _score(value, log_probs, labels)
        confidences.append(log_probs.double().amax(-1).exp().mean().item())
        return rows[value].nll

    tried = _until_unsolved(nll, values[::-1])[::-1]
    _require_order(values[-len(tried) :], confidences[::-1])
    plain = reference
    if isinstance(plain, Predictor):
        plain = metrics.nll(*validation.predictions(plain, "reference"))
    meaning = f"within {price:g} nats of the reference NLL {plain:.4f}"
    most = price + ROUNDING
    costs = [Tried(v, nll - plain) for v, nll in zip(values[-len(tried) :], tried, strict=True)]
    inside = next((i for i, one in enumerate(costs) if one.cost <= most), None)
    if inside is None:
        raise ValueError(
            f"no value in the grid is {meaning}; use less cautious values or a higher price\n"
            f"{_text(_increasing(rows))}"
        )
    if inside > 0:

        def cost(value: float) -> float:
            try:
                return nll(value) - plain
            except UnsolvedError:
                return math.inf

        both = costs[inside], costs[inside - 1]
        chosen = narrowed(cost, (SPENT * price, most), *both, REFINEMENTS)
        return Choice(chosen, _increasing(rows), f"the most cautious value {meaning}")
    end = (
        "in the grid: try more cautious ones"
        if len(tried) == len(values)
        else "for which the solver finds a solution"
    )
    rule = f"the most cautious value {meaning}; it is the most cautious one {end}"
    return Choice(costs[0].knob, _increasing(rows), rule)


def _most_cautious_first(grid: Sequence[float]) -> list[float]:
    """Check that the values of a grid are positive and strictly ordered, and return them."""
    if not len(grid):
        raise ValueError("the grid is empty: pass at least one value")
    values = [checks.require_positive(float(value), "every value in the grid") for value in grid]
    if len({a < b for a, b in pairwise(values)}) > 1 or len(set(values)) < len(values):
        raise ValueError(
            "the grid must begin with the most cautious value and then strictly increase or "
            f"decrease, got {values}"
        )
    return values


def _require_order(values: Sequence[float], confidences: Sequence[float]) -> None:
    """Raise an error if predictions are more confident at the first value than at the last."""
    if confidences[0] > confidences[-1] + ROUNDING:
        raise ValueError(
            "the grid must begin with the most cautious value, but predictions are more confident "
            f"at {values[0]:g} (mean {confidences[0]:.4f}) than at {values[-1]:g} "
            f"({confidences[-1]:.4f}): reverse the grid"
        )


def _increasing(rows: dict[float, Scores]) -> tuple[Scores, ...]:
    return tuple(rows[value] for value in sorted(rows))


def _sorted(grid: Sequence[float]) -> tuple[float, ...]:
    """Check that the values of a grid are positive and return them in increasing order."""
    try:
        values = [float(value) for value in grid]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            "the grid must be a sequence of numbers; is it in the place of another argument?"
        ) from error
    return tuple(_most_cautious_first(sorted({*values})))


def _until_unsolved(evaluate: Callable[[float], T], grid: Sequence[float]) -> list[T]:
    """Evaluate values, the least cautious first, and stop before the first without a solution.

    More cautious values make the optimisation problems of ACNML harder, so no solution is expected
    beyond that value. If the first value has no solution, its `UnsolvedError` is raised.
    """
    found: list[T] = []
    for value in grid:
        try:
            found.append(evaluate(value))
        except UnsolvedError:
            if not found:
                raise
            break
    return found


def _least_nll(table: Sequence[Scores]) -> float:
    """Return the value with the lowest NLL, or the first of them if several tie."""
    return min(table, key=lambda row: row.nll).value


# Temperature -------------------------------------------------------------------------------------


@torch.inference_mode(False)
def temperature_by_nll(
    predictor: Predictor, loader: Iterable[Any], progress: bool | None = None
) -> Choice[Scores]:
    """Return the temperature with the lowest validation NLL (Guo et al. 2017).

    It minimises -1/N Σ log softmax(log p(·|x) / T)_y, which is convex in 1/T, so there is only one
    minimum. Use the result as `Tempered(predictor, T)`. If it was chosen for `Map(classifier)`, it
    can also be used as `classifier.tempered(T)`. Other predictors and fits then use the tempered
    likelihood.

    Args:
        predictor: the predictor to calibrate.
        loader: validation data, with labels. One pass is made.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> plain = acnml.Map(acnml.Classifier(torch.nn.Identity()))
    >>> x = torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> choice = acnml.tuning.temperature_by_nll(plain, (x, torch.tensor([0, 0, 1])))
    >>> round(choice.value, 3)  # softmax([3/T, 0]) = [2/3, 1/3]
    4.328
    """
    require_predictor(predictor)
    log_probs, labels = Validation(loader, progress).predictions(predictor, "temperature")
    checks.require_finite(
        log_probs, "log-probabilities are", "use a predictor whose probabilities are not zero"
    )
    best = least_nll_temperature(log_probs, labels)
    table = tuple(
        _score(t, torch.log_softmax(log_probs.double() / t, dim=-1), labels)
        for t in sorted({1.0, best})
    )
    return Choice(best, table, "the temperature of least validation NLL; 1 changes nothing")


# Prior precision ---------------------------------------------------------------------------------


def prior_precision_by_evidence(
    curvature: Curvature, grid: Sequence[float] = PRIOR_PRECISIONS
) -> Choice[Evidence]:
    """Return the τ that maximises the Laplace approximation of the marginal likelihood.

    This needs no data, and τ is accurate to 0.01 %. With the eigenvalues h_i of the curvature, the
    derivative of the log evidence with respect to log τ is ½ (Σ_i h_i / (h_i + τ) - τ‖θ̂‖²). It
    decreases in τ, so there is only one maximum. The grid brackets it, and a golden-section search
    finds it.

    Args:
        curvature: from `fit_curvature`.
        grid: values of τ. The maximum must lie between the smallest and the largest.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.fit.fit_curvature(classifier, torch.randn(500, 4))
    >>> choice = acnml.tuning.prior_precision_by_evidence(curvature)
    >>> posterior = curvature.posterior(choice.value)
    """
    taus = _sorted(grid)
    found = {tau: curvature.log_evidence(tau) for tau in taus}
    best = taus.index(max(taus, key=found.__getitem__))
    if best in (0, len(taus) - 1):
        text = _text(_evidence_table(found))
        raise ValueError(f"the evidence is largest at an end of the grid: widen it\n{text}")

    def evidence(log_tau: float) -> float:
        tau = math.exp(log_tau)
        found[tau] = curvature.log_evidence(tau)
        return found[tau]

    golden_section(evidence, math.log(taus[best - 1]), math.log(taus[best + 1]), PRECISION)
    chosen = max(found, key=found.__getitem__)
    return Choice(chosen, _evidence_table(found), "the prior precision of largest evidence")


def _evidence_table(found: dict[float, float]) -> tuple[Evidence, ...]:
    return tuple(Evidence(*pair) for pair in sorted(found.items()))


def prior_precision_by_nll(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the τ in the grid with the lowest validation NLL.

    Args:
        make_predictor: e.g. `lambda tau: Acnml(classifier, curvature.posterior(tau))`, with a
            curvature that is computed only once.
        grid: the values to try, e.g. `acnml.tuning.PRIOR_PRECISIONS`.
        loader: validation data, with labels; see `sweep` for the number of passes.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> classifier, x = acnml.Classifier(torch.nn.Linear(4, 3)), torch.randn(100, 4)
    >>> curvature = acnml.fit.fit_curvature(classifier, x)
    >>> choice = acnml.tuning.prior_precision_by_nll(
    ...     lambda tau: acnml.Glm(classifier, curvature.posterior(tau)),
    ...     grid=(0.1, 1.0, 10.0),
    ...     loader=(x, torch.arange(100) % 3),
    ... )
    >>> choice.value in (0.1, 1.0, 10.0)
    True
    """
    table = sweep(make_predictor, _sorted(grid), loader, progress)
    return Choice(_least_nll(table), table, "the prior precision of least validation NLL")


# α -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Tolerance:
    """The largest acceptable loss of validation accuracy and increase of NLL (in nats) over MAP.

    >>> from acnml.tuning import Tolerance
    >>> Tolerance(accuracy=0.01)
    Tolerance(accuracy=0.01, nll=0.05)
    """

    accuracy: float = 0.005
    nll: float = 0.05

    def __post_init__(self) -> None:
        if not (self.accuracy >= 0 and self.nll >= 0):
            raise ValueError(f"tolerances must not be negative or NaN, got {self}")

    def allows(self, accuracy_lost: float, nll_added: float) -> bool:
        """Return whether both losses are at most the tolerance."""
        return accuracy_lost <= self.accuracy + ROUNDING and nll_added <= self.nll + ROUNDING


def largest_harmless_alpha(
    predictor: Acnml,
    loader: Iterable[Any],
    alphas: Sequence[float] = ALPHAS,
    tolerance: Tolerance | None = None,
    progress: bool | None = None,
) -> Choice[Judged]:
    """Return the largest α that loses little accuracy and NLL on in-distribution data.

    This is the rule behind the paper's results with SWAG-D. Lower confidence is useful on
    out-of-distribution data, and the tolerance limits its cost on in-distribution data. The table
    begins with α = 0, which is MAP, the network at the posterior mean. It ends before the first α
    for which the solver finds no solution. For values between those of the grid and for other
    hyperparameters, see `within_price`.

    Args:
        predictor: an `Acnml` predictor. Its α is ignored.
        loader: validation data, with labels; see `sweep` for the number of passes.
        alphas: the values to try; the paper's are `PAPERS_ALPHAS`.
        tolerance: the largest acceptable cost of α; by default `Tolerance()`.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> classifier, x = acnml.Classifier(torch.nn.Linear(4, 3)), torch.randn(100, 4)
    >>> predict = acnml.Acnml(classifier, acnml.fit_laplace(classifier, x))
    >>> data, loose = (x, torch.arange(100) % 3), acnml.tuning.Tolerance(accuracy=0.1)
    >>> acnml.tuning.largest_harmless_alpha(predict, data, (0.001, 0.01), loose).value >= 0.001
    True
    """
    _require_acnml(predictor)
    tolerance = tolerance or Tolerance()
    scores = _scores_by_alpha(predictor, loader, alphas, progress)
    plain = scores[0]
    table = tuple(
        Judged(*row, tolerance.allows(plain.accuracy - row.accuracy, row.nll - plain.nll))
        for row in scores
    )
    harmless = [row.value for row in table[1:] if row.harmless]
    limits = (
        f"loses at most {tolerance.accuracy:g} of MAP's accuracy {plain.accuracy:.4f} and adds at "
        f"most {tolerance.nll:g} nats to MAP's NLL {plain.nll:.4f}"
    )
    if not harmless:
        remedy = "use smaller alphas, a larger tolerance or a higher prior precision"
        raise ValueError(f"no alpha in the grid {limits}; {remedy}\n{_text(table)}")
    return Choice(harmless[-1], table, f"the largest alpha that {limits}")


def alpha_by_nll(
    predictor: Acnml,
    loader: Iterable[Any],
    alphas: Sequence[float] = ALPHAS,
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the α with the lowest validation NLL.

    On in-distribution data this is often the smallest α of the grid. The table begins with α = 0,
    which is MAP, and ends before the first α for which the solver finds no solution. If there is
    none for the smallest α, its `UnsolvedError` is raised. See `largest_harmless_alpha` for the
    arguments.

    >>> import acnml, torch
    >>> classifier, x = acnml.Classifier(torch.nn.Linear(4, 3)), torch.randn(100, 4)
    >>> predict = acnml.Acnml(classifier, acnml.fit_laplace(classifier, x))
    >>> acnml.tuning.alpha_by_nll(predict, (x, torch.arange(100) % 3), alphas=(0.1, 1.0)).value > 0
    True
    """
    _require_acnml(predictor)
    table = tuple(_scores_by_alpha(predictor, loader, alphas, progress))
    return Choice(_least_nll(table[1:]), table, "the alpha of least validation NLL; 0 is MAP")


def alpha_matching_cnml(
    predictor: Acnml,
    x: Inputs,
    cnml_log_lik: Tensor,
    alphas: Sequence[float] = ALPHAS,
    progress: bool | None = None,
) -> Choice[Match]:
    """Return the α for which ACNML's likelihoods are closest to those of CNML.

    This is the first rule that the paper names. CNML uses the training data directly. ACNML
    replaces them by a posterior, and α corrects the scale of that approximation. The distance is
    the mean absolute difference between the likelihoods p_θ̂_y(y|x) of both, over all inputs and
    labels.

    Args:
        predictor: an `Acnml` predictor. Its α is ignored.
        x: a batch of B validation inputs.
        cnml_log_lik: `NaiveCnml(classifier, train_loader).log_lik(x)`, (B, K).
        alphas: the values to try.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> classifier, x = acnml.Classifier(torch.nn.Linear(4, 3)), torch.randn(20, 4)
    >>> posterior = acnml.fit_laplace(classifier, x)
    >>> exact = acnml.Linearised().log_lik(classifier, posterior.scaled(0.1), x)
    >>> predict = acnml.Acnml(classifier, posterior)
    >>> acnml.tuning.alpha_matching_cnml(predict, x, exact, alphas=(0.01, 0.1, 1.0)).value
    0.1
    """
    _require_acnml(predictor)
    x = as_inputs(x)
    expected = as_tensor(cnml_log_lik, "cnml_log_lik").double().cpu().exp()
    features = predictor.features(x)
    values = track(_sorted(alphas), "alpha", progress)
    table = tuple(_match(replace(predictor, alpha=a), x, features, expected) for a in values)
    best = min(table, key=lambda row: row.distance)
    return Choice(best.value, table, "the alpha whose likelihoods are closest to CNML's")


def _match(predictor: Acnml, x: Inputs, features: Features | None, expected: Tensor) -> Match:
    solved = predictor.solve(x) if features is None else predictor.solve_features(features)
    actual = solved.log_lik.double().cpu().exp()
    if actual.shape != expected.shape:
        raise ValueError(
            f"cnml_log_lik has shape {tuple(expected.shape)}, but ACNML's likelihoods have shape "
            f"{tuple(actual.shape)}: compute both for the same inputs"
        )
    difference = actual - expected
    return Match(predictor.alpha, difference.abs().mean().item(), difference.mean().item())


def _require_acnml(predictor: object) -> None:
    """Raise an error if the predictor is not `Acnml`, the only one with an α."""
    if not isinstance(predictor, Acnml):
        kind = type(predictor).__name__
        raise TypeError(f"only Acnml has an alpha to choose, got a {kind}: pass Acnml(...)")


def _scores_by_alpha(
    predictor: Acnml, loader: Iterable[Any], alphas: Sequence[float], progress: bool | None
) -> list[Scores]:
    """Return the scores at α = 0, which is MAP, and at every α that has a solution."""
    grid, validation = _sorted(alphas), Validation(loader, progress)
    validation.prepare(predictor)

    def scored(alpha: float) -> Scores:
        made = replace(predictor, alpha=alpha) if alpha > 0 else Map(predictor.at_mean)
        return _score(alpha, *validation.predictions(made, f"{alpha:g}"))

    return [scored(0.0), *_until_unsolved(scored, grid)]
