"""Which predictions may go out without a person: thresholds with a guarantee.

Predictions that are at least as sure as a threshold are accepted; the share of accepted ones is the
*coverage*, the error rate among them the *risk*.

`at_most_risk` certifies a threshold whose risk is at most a limit (Learn then Test, Angelopoulos et
al. 2021; selective risk control, Geifman & El-Yaniv 2017). It tests fixed numbers of accepted
examples, the surest first, until the exact binomial test

    H: the risk is above r,    rejected if P(Bin(k, r) ≤ errors among the k surest) ≤ 1 - confidence

fails for the first time. The order of the tests is fixed in advance, so each may use the whole
level. `at_least_coverage` is the dual: an order statistic whose coverage is at least a share, and
an exact upper bound of the risk there.

What is assumed:

- New data are drawn like the labelled data, independently. **Under shift nothing is guaranteed.**
- The error rate does not rise with sureness. Otherwise a threshold can be missed (which costs
  coverage), and the chance of a risk above the limit can be a little higher than stated.
- Sureness was not fitted to the labelled data. A `Calibrator` chose two numbers on them, T and α;
  for a guarantee to the letter, use labelled data of your own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor

from acnml._util.arrays import as_values
from acnml._util.checks import require_share
from acnml.decisions.outcomes import By, Outcomes, sureness_of

# Thresholds that are tested, evenly spaced from the surest examples to all of them.
STEPS = 60

# The first threshold accepts this share of the examples. Fewer would make a single error among the
# surest predictions the end of all tests.
FIRST = 1 / 4

# No data set is larger than this when it is asked how many examples would be enough.
MOST_EXAMPLES = 10**6


@final
@dataclass(frozen=True)
class Certificate:
    """A threshold and what is certified of it, from labelled examples.

    Attributes:
        threshold: accept predictions that are at least as sure; infinite if nothing is certified.
        examples: labelled examples.
        accepted: of these, with the threshold.
        errors: among the accepted ones.
        risk: certified upper bound of the risk; 1 if nothing is certified.
        coverage: certified lower bound of the coverage; 0 if none was asked for.
        needed: how many examples would be enough for a certificate, if they are like these; None
            if there is one, or if too many of these are wrong or have no answer.

    >>> Certificate(0.9, examples=1000, accepted=800, errors=6, risk=0.02).is_certified
    True
    """

    threshold: float
    examples: int
    accepted: int
    errors: int
    risk: float
    coverage: float = 0.0
    needed: int | None = None

    @property
    def is_certified(self) -> bool:
        """Whether there is a threshold."""
        return self.threshold < math.inf


@final
@dataclass(frozen=True)
class Abstention:
    """When to abstain, with a guarantee; made by `Calibrated.abstention`.

    Attributes:
        by: "confidence" or "regret".
        confidence: with which the certificates hold, each of them by itself.
        certificates: one for all predictions, or one for every predicted class.

    >>> certificate = Certificate(0.9, examples=1000, accepted=800, errors=6, risk=0.02)
    >>> print(Abstention("confidence", 0.95, (certificate,)))
    Accept predictions with a confidence of at least 0.9: 80.0 % of 1,000 validation examples, of \
which 0.8 % are wrong. On data like these at most 2.0 % are wrong, with 95 % confidence.
    """

    by: By
    confidence: float
    certificates: tuple[Certificate, ...]

    def accepts(self, answer: Any) -> Any:
        """Return which predictions of an `Answer` may go out without a person (B,)."""
        sure, label = sureness_of(answer, self.by), as_values(answer.label).long()
        # The last one is for inputs without an answer (-1) and classes without validation data.
        known = [*(each.threshold for each in self.certificates), math.inf]
        limits = torch.tensor(known, dtype=torch.float64, device=sure.device)
        if len(self.certificates) == 1:
            label = label.clamp(max=0)
        accepted = sure >= limits[label.clamp(max=len(self.certificates))]
        return accepted if isinstance(answer.label, Tensor) else accepted.numpy()

    def __str__(self) -> str:
        if len(self.certificates) == 1:
            return self._sentence(self.certificates[0])
        each = [f"Class {k}: {self._sentence(c)}" for k, c in enumerate(self.certificates)]
        return "\n".join(each)

    def _sentence(self, found: Certificate) -> str:
        if not found.is_certified:
            more = "More of them would not help: too many are wrong, or have no answer."
            if found.needed is not None:
                more = f"About {found.needed:,} would be enough, if they are like these."
            return f"No threshold can be certified with {found.examples:,} examples. {more}"
        limit = f"a confidence of at least {found.threshold:.4g}"
        if self.by == "regret":
            limit = f"a regret of at most {-found.threshold:.4g}"
        share, wrong = found.accepted / found.examples, found.errors / found.accepted
        also = f"at least {found.coverage:.1%} are accepted and " if found.coverage else ""
        text = (
            f"Accept predictions with {limit}: {share:.1%} of {found.examples:,} validation "
            f"examples, of which {wrong:.1%} are wrong. On data like these {also}at most "
            f"{found.risk:.1%} are wrong, with {100 * self.confidence:g}% confidence."
        )
        return text.replace("%", " %")


def abstention(
    validation: Outcomes,
    risk: float | None = None,
    coverage: float | None = None,
    confidence: float = 0.95,
    by: By = "confidence",
    by_class: bool = False,
) -> Abstention:
    """Return when to abstain; for the arguments see `acnml.Calibrator.abstention`.

    >>> sure, right = torch.linspace(0, 1, 1000), torch.arange(1000) < 300
    >>> validation = Outcomes(torch.zeros(1000), right, sure, 1 - sure, 1 - sure)
    >>> abstention(validation, risk=0.02).certificates[0].accepted
    695
    """
    if (risk is None) == (coverage is None):
        raise ValueError("give one of risk and coverage: the other follows from it")
    sure, correct, group = sureness_of(validation, by), validation.correct, validation.predicted
    group = group if by_class else torch.zeros_like(group)
    found = []
    for k in range(int(group.max()) + 1):
        own = sure[group == k], correct[group == k]
        if risk is not None:
            found.append(at_most_risk(*own, risk, confidence))
        elif coverage is not None:
            found.append(at_least_coverage(*own, coverage, confidence))
    return Abstention(by, confidence, tuple(found))


def at_most_risk(
    sureness: Tensor, correct: Tensor, risk: float, confidence: float = 0.95
) -> Certificate:
    """Return the lowest threshold whose risk is certified to be at most a limit.

    Args:
        sureness: of predictions (N,), for example their confidence.
        correct: whether they are right (N,).
        risk: largest tolerated error rate among accepted predictions.
        confidence: with which the limit holds, over the draw of the labelled data.

    >>> certificate = at_most_risk(torch.rand(50), torch.ones(50, dtype=torch.bool), risk=0.02)
    >>> certificate.is_certified, certificate.needed
    (False, 149)
    """
    require_share(risk, "risk")
    require_share(confidence, "confidence")
    ranked, level, best = _Ranked.of(sureness, correct), 1 - confidence, 0
    for tried in _steps(len(ranked.values), risk, level):
        accepted = ranked.with_ties(tried)
        if binomial_cdf(int(ranked.errors[accepted]), accepted, risk) > level:
            break
        best = accepted
    return ranked.certificate(best, risk, needed=None if best else _needed(ranked, risk, level))


def at_least_coverage(
    sureness: Tensor, correct: Tensor, coverage: float, confidence: float = 0.95
) -> Certificate:
    """Return the highest threshold that is certified to accept a share, and a bound of its risk.

    Both hold together with the stated confidence, as each uses half of the level. `coverage` is
    the least tolerated share of accepted predictions; for the other arguments see `at_most_risk`.

    >>> correct = torch.arange(1000) >= 100
    >>> found = at_least_coverage(torch.linspace(0, 1, 1000), correct, coverage=0.8)
    >>> found.accepted, found.errors, round(found.risk, 4)
    (825, 0, 0.0045)
    """
    require_share(coverage, "coverage")
    require_share(confidence, "confidence")
    ranked, level = _Ranked.of(sureness, correct), (1 - confidence) / 2
    count, answered = len(ranked.values), int((ranked.values > -math.inf).sum())
    # The coverage of the k surest of N is Beta(k, N - k + 1): P(coverage < c) = P(Bin(N, c) ≥ k).
    least = _first(count + 1, lambda k: binomial_cdf(k - 1, count, coverage) >= 1 - level)
    if least > answered:
        needed = math.ceil(math.log(level) / math.log(coverage))  # all of them: c^N ≤ level
        return ranked.certificate(0, 1.0, needed=needed if answered == count else None)
    accepted = ranked.with_ties(least)
    bound = upper_bound(int(ranked.errors[accepted]), accepted, 1 - level)
    return ranked.certificate(accepted, bound, coverage)


@lru_cache(maxsize=2**14)
def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """Return P(Bin(trials, probability) ≤ successes)."""
    if successes >= trials or probability <= 0:
        return float(successes >= 0)
    if successes < 0 or probability >= 1:
        return 0.0
    k = torch.arange(successes + 1, dtype=torch.float64, device="cpu")
    ways = math.lgamma(trials + 1) - torch.lgamma(k + 1) - torch.lgamma(trials - k + 1)
    terms = ways + k * math.log(probability) + (trials - k) * math.log1p(-probability)
    return min(1.0, float(torch.logsumexp(terms, 0).exp()))


def upper_bound(errors: int, trials: int, confidence: float) -> float:
    """Return the upper end of the one-sided interval of Clopper and Pearson for an error rate."""
    if errors >= trials:
        return 1.0
    low, high = errors / trials, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        is_below = binomial_cdf(errors, trials, middle) > 1 - confidence
        low, high = (middle, high) if is_below else (low, middle)
    return high


@final
@dataclass(frozen=True, eq=False)
class _Ranked:
    """Labelled examples, the surest first."""

    values: Tensor  # sureness (N,)
    errors: Tensor  # among the k surest (N + 1,)

    @staticmethod
    def of(sureness: Tensor, correct: Tensor) -> _Ranked:
        own, right = as_values(sureness).cpu().double(), as_values(correct).cpu()
        if own.shape != right.shape:
            shapes = f"{tuple(own.shape)} and {tuple(right.shape)}"
            raise ValueError(f"sureness and correct differ in shape: {shapes}")
        own = own.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)  # no answer
        values, order = own.sort(descending=True, stable=True)
        wrong = (~right.bool()[order]).cumsum(0)
        return _Ranked(values, torch.cat([wrong.new_zeros(1), wrong]))

    def with_ties(self, count: int) -> int:
        """Return how many examples are as sure as the last of the `count` surest, or surer."""
        return int(torch.searchsorted(-self.values, -self.values[count - 1], right=True))

    def certificate(
        self, accepted: int, risk: float, coverage: float = 0.0, needed: int | None = None
    ) -> Certificate:
        """Return the threshold that accepts so many of the examples; none for 0.

        It lies in the middle between two examples, so that rounding does not decide.
        """
        if not accepted:
            return Certificate(math.inf, len(self.values), 0, 0, 1.0, needed=needed)
        ends = self.values[accepted - 1 : accepted + 1]
        threshold = float(ends.mean()) if len(ends) > 1 else -math.inf
        errors = int(self.errors[accepted])
        return Certificate(threshold, len(self.values), accepted, errors, risk, coverage)


def _steps(count: int, risk: float, level: float) -> Sequence[int]:
    """Return the numbers of accepted examples that are tested, ascending; they ignore the data."""
    first = max(least_examples(risk, level), math.ceil(FIRST * count))
    if first > count:
        return ()
    places = torch.linspace(first, count, STEPS, dtype=torch.float64, device="cpu")
    return places.ceil().long().unique().tolist()


def least_examples(risk: float, level: float) -> int:
    """Return how many accepted examples without any error certify a risk: (1 - r)^k ≤ level."""
    return math.ceil(math.log(level) / math.log1p(-risk))


def _needed(ranked: _Ranked, risk: float, level: float) -> int | None:
    """Return how many examples would certify a threshold, with the error rates of these."""
    count, found = len(ranked.values), MOST_EXAMPLES + 1
    if not count:
        return least_examples(risk, level)

    def enough(k: int, rate: float) -> bool:
        return binomial_cdf(math.ceil(k * rate), k, risk) <= level

    for accepted in range(math.ceil(FIRST * count), count + 1, max(1, count // STEPS)):
        rate, share = int(ranked.errors[accepted]) / accepted, accepted / count
        if rate < risk:
            least = _first(int(found * share) + 1, partial(enough, rate=rate))
            found = min(found, math.ceil(least / share))
    return found if found <= MOST_EXAMPLES else None


def _first(end: int, holds: Callable[[int], bool]) -> int:
    """Return the first of 1, ..., end for which a condition holds that then goes on holding."""
    return 1 + bisect_left(range(1, end), True, key=holds)
