"""Choose α, the weight of the query in ACNML, by rules of the paper (appendix A).

The paper names three: match the likelihoods of CNML (`alpha_matching_cnml`); select by validation
like a temperature (`alpha_by_nll`); take the largest α that does not degrade accuracy and NLL
(`largest_harmless_alpha`), which it uses for its SWAG-D results.

A larger α lets the weights adapt more to each label of the query, which makes predictions less
confident. In the limit α → 0 the prediction is that of the network itself, called MAP here. CNML is
the method that ACNML approximates; it trains the network again for every label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from torch import Tensor

from acnml._engine.last_layer import Features
from acnml._util.batches import Inputs, as_inputs, as_tensor
from acnml._util.progress import track
from acnml.predictors import Acnml, Map
from acnml.tuning._validation import Validation
from acnml.tuning.choice import Choice, table_text
from acnml.tuning.sweep import MakePredictor, Scores, increasing, least_nll, score, until_unsolved

PAPERS_ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0)
# A wider grid than the paper's. With Laplace posteriors of overconfident networks, α = 1 is often
# far too cautious.
ALPHAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


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
        rounding = 1e-9
        return accuracy_lost <= self.accuracy + rounding and nll_added <= self.nll + rounding


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
        loader: validation data, with labels. If the posterior covers only the last layer, this
            takes one pass, otherwise one pass for every α.
        alphas: the values to try; the paper's are `PAPERS_ALPHAS`.
        tolerance: the largest acceptable cost of α; by default `Tolerance()`.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, x[:250])
    >>> validation = [(x[250:], labels[250:])]
    >>> predict = acnml.Acnml(classifier, posterior)
    >>> choice = acnml.tuning.largest_harmless_alpha(predict, validation, alphas=(0.01, 0.1, 1.0))
    >>> choice.value in (0.01, 0.1, 1.0)
    True
    """
    _require_acnml(predictor)
    tolerance = tolerance or Tolerance()
    grid, evaluate = increasing(alphas), _evaluation(predictor, loader, progress)
    scores = until_unsolved(evaluate, (0.0, *grid))
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
        raise ValueError(f"no alpha in the grid {limits}; {remedy}\n{table_text(table)}")
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
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, x[:250])
    >>> validation = [(x[250:], labels[250:])]
    >>> predict = acnml.Acnml(classifier, posterior)
    >>> choice = acnml.tuning.alpha_by_nll(predict, validation, alphas=(0.01, 0.1, 1.0))
    >>> choice.value in (0.01, 0.1, 1.0)
    True
    """
    _require_acnml(predictor)
    grid, evaluate = increasing(alphas), _evaluation(predictor, loader, progress)
    table = (evaluate(0.0), *until_unsolved(evaluate, grid))
    return Choice(least_nll(table[1:]), table, "the alpha of least validation NLL; 0 is MAP")


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
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, x[:250])
    >>> validation = [(x[250:], labels[250:])]
    >>> predict = acnml.Acnml(classifier, posterior)
    >>> exact = acnml.Linearised().log_lik(classifier, posterior.scaled(0.1), x[:20])
    >>> acnml.tuning.alpha_matching_cnml(predict, x[:20], exact, alphas=(0.01, 0.1, 1.0)).value
    0.1
    """
    _require_acnml(predictor)
    x = as_inputs(x)
    expected = as_tensor(cnml_log_lik, "cnml_log_lik").double().cpu().exp()
    features = predictor.features(x)
    values = track(increasing(alphas), "alpha", progress)
    table = tuple(_match(replace(predictor, alpha=a), x, features, expected) for a in values)
    best = min(table, key=lambda row: row.distance)
    return Choice(best.value, table, "the alpha whose likelihoods are closest to CNML's")


def _require_acnml(predictor: object) -> None:
    """Raise an error if the predictor is not `Acnml`, the only one with an α."""
    if not isinstance(predictor, Acnml):
        kind = type(predictor).__name__
        raise TypeError(f"only Acnml has an alpha to choose, got a {kind}: pass Acnml(...)")


def _with_alpha(predictor: Acnml) -> MakePredictor:
    """Return a function from α to the predictor with this α; α = 0 gives the network at μ."""
    at_mean = Map(predictor.classifier.at(predictor.posterior.mean))
    return lambda alpha: replace(predictor, alpha=alpha) if alpha > 0 else at_mean


def _evaluation(
    predictor: Acnml, loader: Iterable[Any], progress: bool | None
) -> Callable[[float], Scores]:
    """Return a function from α to the scores on validation data; α = 0 is MAP."""
    make_predictor, validation = _with_alpha(predictor), Validation(loader, progress)
    validation.prepare(predictor)
    return lambda alpha: score(alpha, *validation.predictions(make_predictor(alpha), f"{alpha:g}"))


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
