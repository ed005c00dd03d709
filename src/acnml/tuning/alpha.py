"""Choosing α, the weight of the query in ACNML: the paper's two rules, and least NLL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from torch import Tensor

from acnml._util.batches import Inputs
from acnml._util.progress import track
from acnml.head.features import Features
from acnml.predictors import Acnml, Map
from acnml.tuning._validation import Validation
from acnml.tuning.choice import Choice, table_text
from acnml.tuning.sweep import MakePredictor, Scores, increasing, least_nll, score, until_unsolved

PAPERS_ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0)
# Wider than the paper's: for Laplace posteriors of sharp networks α = 1 is often far too cautious.
ALPHAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Judged(NamedTuple):
    """`Scores`, and whether they are within the tolerance of MAP's."""

    value: float
    accuracy: float
    nll: float
    brier: float
    ece: float
    harmless: bool


class Match(NamedTuple):
    """The mean difference between the likelihoods p_θ̂_y(y|x) of ACNML and those of CNML."""

    value: float
    distance: float  # mean |ACNML - CNML|
    excess: float  # mean (ACNML - CNML): above 0 if a smaller alpha would be closer


@final
@dataclass(frozen=True)
class Tolerance:
    """How much worse than MAP's the validation accuracy and mean NLL (in nats) may be."""

    accuracy: float = 0.005
    nll: float = 0.05

    def __post_init__(self) -> None:
        if not (self.accuracy >= 0 and self.nll >= 0):
            raise ValueError(f"tolerances must not be negative, got {self}")

    def allows(self, accuracy_lost: float, nll_added: float) -> bool:
        """Return whether both losses are within the tolerance; equality counts as within."""
        rounding = 1e-9
        return accuracy_lost <= self.accuracy + rounding and nll_added <= self.nll + rounding


def largest_harmless_alpha(
    predictor: Acnml,
    loader: Iterable[Any],
    alphas: Sequence[float] = ALPHAS,
    tolerance: Tolerance | None = None,
    progress: bool | None = None,
) -> Choice[Judged]:
    """Return the largest α that costs little accuracy and NLL on data like the training data.

    The paper's first rule: caution is wanted on other data and should cost almost nothing on these.
    The table begins with α = 0, which is MAP: the network at the posterior's mean. It ends before
    the first α for which the solver finds no solution. For values between those of the grid, and
    for other knobs, see `within_price`.

    Args:
        predictor: its classifier, posterior and solver are used; its α is replaced.
        loader: validation data, with labels; one pass for a last layer, else one for every α.
        alphas: the values to try; the paper's are `PAPERS_ALPHAS`.
        tolerance: how much α may cost; `Tolerance()` by default.
        progress: show progress bars; by default in a terminal only.
    """
    _require_acnml(predictor)
    tolerance = tolerance or Tolerance()
    make_predictor, validation = _with_alpha(predictor), Validation(loader, progress)
    validation.prepared(predictor)

    def evaluate(alpha: float) -> Scores:
        return score(alpha, *validation.predictions(make_predictor(alpha), f"{alpha:g}"))

    scores = until_unsolved(evaluate, (0.0, *increasing(alphas)))
    plain = scores[0]
    table = tuple(
        Judged(*row, tolerance.allows(plain.accuracy - row.accuracy, row.nll - plain.nll))
        for row in scores
    )
    harmless = [row.value for row in table[1:] if row.harmless]
    limits = (
        f"costs at most {tolerance.accuracy:g} of MAP's accuracy {plain.accuracy:.4f} and adds at "
        f"most {tolerance.nll:g} nats to its NLL {plain.nll:.4f}"
    )
    if not harmless:
        remedy = "give smaller alphas, a larger tolerance or a tighter posterior"
        raise ValueError(f"no alpha of the grid {limits}; {remedy}\n{table_text(table)}")
    return Choice(harmless[-1], table, f"the largest alpha that {limits}")


def alpha_by_nll(
    predictor: Acnml,
    loader: Iterable[Any],
    alphas: Sequence[float] = ALPHAS,
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the α of least validation NLL.

    On data like the training data this is often the smallest of the grid. The table begins with
    α = 0, which is MAP.
    """
    _require_acnml(predictor)
    make_predictor, validation = _with_alpha(predictor), Validation(loader, progress)
    validation.prepared(predictor)
    table = tuple(
        score(alpha, *validation.predictions(make_predictor(alpha), f"{alpha:g}"))
        for alpha in (0.0, *increasing(alphas))
    )
    return Choice(least_nll(table[1:]), table, "the alpha of least validation NLL; 0 is MAP")


def alpha_matching_cnml(
    predictor: Acnml,
    x: Inputs,
    cnml_log_lik: Tensor,
    alphas: Sequence[float] = ALPHAS,
    progress: bool | None = None,
) -> Choice[Match]:
    """Return the α with which ACNML's likelihoods are closest to CNML's.

    The paper's second rule. The posterior only approximates the likelihood of the training data,
    and α corrects its scale; CNML uses the training data themselves. The distance is the mean of
    |p_θ̂_y(y|x) - CNML's| over all inputs and labels.

    Args:
        predictor: its classifier, posterior and solver are used; its α is replaced.
        x: some validation inputs, B of them.
        cnml_log_lik: `NaiveCnml(classifier, train_loader).log_lik(x)`, (B, K).
        alphas: the values to try.
        progress: show a progress bar; by default in a terminal only.
    """
    _require_acnml(predictor)
    expected = cnml_log_lik.double().cpu().exp()
    features = predictor.features(x)
    values = track(increasing(alphas), "alpha", progress)
    table = tuple(_match(replace(predictor, alpha=a), x, features, expected) for a in values)
    best = min(table, key=lambda row: row.distance)
    return Choice(best.value, table, "the alpha whose likelihoods are closest to CNML's")


def _require_acnml(predictor: object) -> None:
    """Refuse predictors that have no α."""
    if not isinstance(predictor, Acnml):
        kind = type(predictor).__name__
        raise TypeError(f"only Acnml has an alpha to choose, got a {kind}: give Acnml(...)")


def _with_alpha(predictor: Acnml) -> MakePredictor:
    """Return α ↦ the predictor with this α; the limit α = 0 is the network at the mean."""
    at_mean = Map(predictor.classifier.at(predictor.posterior.mean))
    return lambda alpha: replace(predictor, alpha=alpha) if alpha > 0 else at_mean


def _match(predictor: Acnml, x: Inputs, features: Features | None, expected: Tensor) -> Match:
    solved = predictor.solve(x) if features is None else predictor.solve_features(features)
    actual = solved.log_lik.double().cpu().exp()
    if actual.shape != expected.shape:
        raise ValueError(
            f"cnml_log_lik has shape {tuple(expected.shape)}, ACNML's likelihoods "
            f"{tuple(actual.shape)}: compute both for the same inputs"
        )
    difference = actual - expected
    return Match(predictor.alpha, difference.abs().mean().item(), difference.mean().item())
