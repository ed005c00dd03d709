"""The core: (logits, features) of any classifier in, probabilities and a regret out.

No network is needed. `fit_calibrator` learns from arrays what is typical and how much caution may
cost, and a `Calibrator` answers for arrays. `acnml.calibrate` reads the arrays from an `nn.Module`.

A *rule* turns logits and a score of atypicality into how well every label can be explained.
All rules take logits z (B, K), already divided by the temperature, and a *variance* v (B,),

    v(x) = α m(x)²,

where m(x) is the score of `acnml.atypicality.Atypicality`. For v = 0 each of them returns
log softmax(z). A larger variance is never surer, and no rule changes the order of the classes.

- `closed-form`, the default: predictive NML of a linear head under squared loss, whose leverage
  φᵀ(ΦᵀΦ)⁻¹φ is a Mahalanobis distance (Bibas, Feder & Hassner 2021):
  log p_y / (p_y + p_y^h (1 - p_y)) with h = v / (1 + v).
- `acnml`: log p_θ̂_y(y|x), NML under the log loss, for logits with covariance V = vI: the posterior
  of the same head, W | data ~ MN(μ, (ΦᵀΦ)⁻¹, σ²I). For two classes only the difference of the
  logits counts, whose variance is 2v.
- `density-temperature`: log softmax(z / (1 + v)), a baseline without a regret (Tomani et al. 2023).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from acnml._util import checks
from acnml._util.arrays import as_values
from acnml.atypicality import Atypicality
from acnml.calibration.heads import Head
from acnml.calibration.table import COLUMNS, EQUAL_PRICE, CalibrationRow, as_html, as_text
from acnml.decisions import (
    Abstention,
    By,
    Monitor,
    Outcomes,
    abstention,
    expected_accuracy,
)
from acnml.decisions.outcomes import sureness_of
from acnml.solve.isotropic import solve_isotropic
from acnml.solve.sigmoid import solve_sigmoid

RuleName: TypeAlias = Literal["closed-form", "acnml", "density-temperature"]

# The power of the score in the variance.
POWER = 2

# A larger variance counts as this one, so that it stays finite.
LARGEST_VARIANCE = 1e30

# ACNML is solved for variances up to this one.
MOST_SOLVED = 1e6

# Scores tie if they differ by at most this share: rounding differs from batch to batch.
TIE = 1e-5

# Places that are answered at a time.
PLACES_AT_ONCE = 4096


class Answer(NamedTuple):
    """What is known of a batch of inputs, from one forward pass.

    With positions, as in maps and texts, every part has them in the layout of the logits. With
    several labels per input, `label` (B, K) is 1 for those present, `probs` (B, K) are of presence,
    and `regret` and `abstain` are (B, K).
    """

    label: Tensor  # (B,) the likeliest class; -1 for an input without an answer
    probs: Tensor  # (B, K)
    log_probs: Tensor  # (B, K)
    regret: Tensor  # (B,) log C(x), from 0 to log K: high where many labels could be explained
    score: Tensor  # (B,) atypicality: about 1 for data like the training data
    abstain: Tensor  # (B,) whether the input is less certain than most validation data

    @property
    def confidence(self) -> Tensor:
        """The probability of the likeliest class (B,)."""
        largest: Any = as_values(self.probs).amax(-1)
        return largest.numpy() if isinstance(self.probs, np.ndarray) else largest


class Answering(ABC):
    """What follows from an `Answer`, for all that give one.

    A `Calibrator` answers for logits and features, a `Calibrated` network for its inputs. Each
    method takes the same *inputs* as a call.
    """

    calibrator: Calibrator

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Answer:
        """Return everything about a batch of inputs."""

    def log_probs(self, *inputs: Any) -> Any:
        """Return the log-probabilities (B, K)."""
        return self(*inputs).log_probs

    def probs(self, *inputs: Any) -> Any:
        """Return the probabilities (B, K)."""
        return self(*inputs).probs

    def predict(self, *inputs: Any) -> Any:
        """Return the likeliest class of every input (B,), or -1 for one without an answer."""
        return self(*inputs).label

    def regret(self, *inputs: Any) -> Any:
        """Return log C(x) (B,), from 0 to log K: high where many labels could be explained."""
        return self(*inputs).regret

    def score(self, *inputs: Any) -> Any:
        """Return the atypicality m(x) (B,): about 1 for data like the training data."""
        return self(*inputs).score

    def abstains(self, *inputs: Any, share: float = 0.05, by: By = "confidence") -> Any:
        """Return which inputs (B,) are less certain than this share of the validation data."""
        return self(*inputs, share=share, by=by).abstain

    def threshold(self, share: float, by: By = "confidence") -> float:
        """Return the value beyond which the least certain `share` of the validation data lies.

        Inputs with a confidence below it, or a regret above it, are rejected. On data like the
        validation data that is a share of `share`; on other data usually a larger one.
        """
        ordered = self.calibrator.ordered.get(by)
        if ordered is None:
            raise ValueError(f'by must be "confidence" or "regret", got {by!r}')
        if not 0 <= share <= 1:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        place = share * (len(ordered) - 1)
        low, *high = ordered[int(place) : int(place) + 2]
        limit = low + (place - int(place)) * (high[0] - low) if high else low
        return limit if by == "confidence" else -limit

    def abstention(
        self,
        risk: float | None = None,
        *,
        coverage: float | None = None,
        confidence: float = 0.95,
        by: By = "confidence",
        by_class: bool = False,
    ) -> Abstention:
        """Return when to abstain, with a guarantee for data like the validation data.

        Either `risk`: at most this share of the accepted predictions is wrong. Or `coverage`: at
        least this share of the predictions is accepted, and the result says how many of them are
        wrong at most. `abstention(risk=0.02).accepts(answer)` says which predictions may go out.
        Assumptions, and what happens if they are broken: `acnml.decisions`.

        Args:
            risk: largest tolerated error rate among accepted predictions.
            coverage: least tolerated share of accepted predictions.
            confidence: with which the guarantee holds.
            by: what a threshold is put on, "confidence" or "regret".
            by_class: whether every predicted class has a threshold of its own.
        """
        self.calibrator.head.require_one_row("a guarantee")
        return abstention(self.calibrator.outcomes, risk, coverage, confidence, by, by_class)

    def expected_accuracy(self, *inputs: Any, groups: Any = None, level: float = 0.95) -> Any:
        """Return the accuracy that predictions without labels probably have, with an interval.

        Args:
            inputs: that have no labels.
            groups: a value for every input (B,). Then the result maps each value to an estimate.
                The predicted classes give the precision of every class.
            level: of the interval; what it assumes is in `acnml.decisions.accuracy`.
        """
        self.calibrator.head.require_one_row("an interval")
        return expected_accuracy(self(*inputs).confidence, self.calibrator.outcomes, level, groups)

    def monitor(self, level: float = 0.01) -> Monitor:
        """Return a monitor of answers, see `acnml.decisions.monitor`.

        Args:
            level: largest probability of a false alarm, over the whole life of the monitor.
        """
        self.calibrator.head.require_one_row("a bound on false alarms")
        return Monitor.of(self.calibrator.outcomes, level)


@final
@dataclass(frozen=True, eq=False)
class Calibrator(Answering):
    """Calibrated probabilities for logits and features, made by `fit_calibrator`.

    Attributes:
        atypicality: m(x), from the features.
        rule: "closed-form", "acnml" or "density-temperature", see above.
        temperature: T, by which the logits are divided.
        alpha: α, the weight of the score.
        price: that was asked for, in nats.
        table: methods on the validation data, see `CalibrationRow`.
        notes: what to know about the choice, in sentences.
        outcomes: the answers for the validation data, from which decisions follow.
        on_error: what to do about inputs without an answer: their logits or features are not
            finite. "raise" raises an error that names them. "flag" answers for the others; these
            have NaN, the label -1, and abstain.
        head: what the logits stand for, see `acnml.calibration.heads`.

    >>> x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    >>> logits, labels = 3 * x[:, :1] * torch.tensor([-1.0, 1.0]), (x.sum(1) > 0).long()
    >>> calibrator = acnml.fit_calibrator((x, labels), (logits, x, labels))
    >>> calibrator.abstention(risk=0.05).certificates[0].is_certified
    True
    """

    atypicality: Atypicality
    rule: RuleName
    temperature: float
    alpha: float
    price: float
    table: tuple[CalibrationRow, ...]
    notes: tuple[str, ...]
    outcomes: Outcomes
    on_error: Literal["raise", "flag"] = "raise"
    head: Head = field(default_factory=Head)

    def __call__(
        self,
        logits: Any,
        features: Any,
        share: float = 0.05,
        by: By = "confidence",
        mask: Any = None,
    ) -> Answer:
        """Return everything about inputs with logits (B, K) and features (B, q).

        Args:
            logits: as the network returns them, without a temperature; (B, K, H, W) and other
                layouts as in the validation data.
            features: of the same inputs, in the same layout; maps may be smaller.
            share: of validation data that are less certain than the inputs to answer.
            by: what decides, see `threshold`.
            mask: of tokens (B, T): False for padding, which gets no answer.
        """
        if isinstance(logits, np.ndarray):
            known = None if mask is None else as_values(mask)
            return as_arrays(self(as_values(logits), as_values(features), share, by, known))
        limit = self.threshold(share, by)
        found = self.explained(logits.detach(), features.detach(), mask)
        label, confidence, probs, log_probs, regret, score = found
        if self.on_error == "raise" and bool(regret.isnan().any()):
            self._require_answers(regret, mask)
        is_sure = confidence >= limit * (1 - TIE) if by == "confidence" else regret <= limit + TIE
        return Answer(label, probs, log_probs, regret, score, ~is_sure)

    def explained(
        self, logits: Tensor, features: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return label, confidence, probabilities, their logarithms, regret and score.

        Without an answer they are NaN. The operations do not depend on values, so that they can be
        compiled and exported.
        """
        head = self.head
        logits = head.expanded(logits) if head.is_single else logits
        flat, score = head.flat(logits), in_parts(self.atypicality, head.flat(features))
        if head.positions:
            score = head.on_positions(score, features.shape, logits.shape)
        if mask is not None:
            score = score.where(mask.bool().flatten(), torch.nan)
        parts = in_parts(self._at_cases, flat, score)
        if not head.positions:
            return parts
        return tuple(head.laid_out(part, logits.shape) for part in parts)

    def _at_cases(self, flat: Tensor, score: Tensor) -> tuple[Tensor, ...]:
        """Return what is known of places with logits (P, K) and scores (P,)."""
        head, size = self.head, flat.shape[1]
        wide = torch.promote_types(flat.dtype, torch.float32)
        # Times 0, a number that is not finite is NaN, and sums hand it on; all others add nothing.
        nothing = score * 0 + (flat * 0).sum(-1)
        z, m, nothing_here = head.rows(flat, score, nothing)
        z = z.to(wide) / self.temperature
        log_lik = RULES[self.rule](z, variance(self.alpha, m).to(wide))
        # Of every rule, some label has a likelihood of 1 / K at least: sums of them are safe.
        likelihood = log_lik.exp()
        total = likelihood.sum(-1) + nothing_here
        probs, log_total = likelihood / total.unsqueeze(-1), total.log()
        # No rule changes the order of the classes, but a huge variance makes them all equal.
        label = z.argmax(-1, keepdim=True)
        confidence, label = probs.gather(-1, label).squeeze(-1), label.squeeze(-1)
        # Rounding may add to the limits of the regret.
        regret = log_total.clamp(0.0, math.log(log_lik.shape[-1]))
        log_probs, label = log_lik - log_total.unsqueeze(-1), label.masked_fill(regret.isnan(), -1)
        rows = label, confidence, probs, log_probs, regret
        return (*head.per_place(rows, size), score + nothing)

    @cached_property
    def ordered(self) -> dict[str, list[float]]:
        """How sure the validation answers are, the least sure first."""
        both: tuple[By, ...] = ("confidence", "regret")
        return {by: sureness_of(self.outcomes, by).sort().values.tolist() for by in both}

    @property
    def calibrator(self) -> Calibrator:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def temperature_of_equal_price(self) -> float:
        """The plain temperature that costs as much on the validation data."""
        return next(row.temperature for row in self.table if row.method == EQUAL_PRICE)

    def to(self, device: torch.device | str | torch.dtype) -> Calibrator:
        """Return the same calibrator for tensors on a device, or in a precision."""
        return replace(self, atypicality=self.atypicality.to(device))

    def _require_answers(self, regret: Tensor, mask: Tensor | None) -> None:
        """Raise an error about inputs without an answer."""
        lacking = regret.isnan()
        if mask is not None:
            lacking = lacking & mask.bool().reshape(*mask.shape, *[1] * (regret.ndim - mask.ndim))
        if bool(lacking.any()):
            raise checks.RowsError(
                "logits or features are NaN or infinite",
                lacking.flatten(1).any(1).nonzero().flatten().tolist()
                if lacking.ndim > 1
                else lacking.nonzero().flatten().tolist(),
                len(lacking),
                'clean these inputs, or flag them with on_error="flag"',
            )

    def __str__(self) -> str:
        table = as_text([COLUMNS, *(row.cells for row in self.table)])
        return "\n".join([table, "", *self.notes])

    def _repr_html_(self) -> str:
        """Return the table for notebooks, with the chosen row in bold."""
        cells = [row.cells for row in self.table]
        chosen = [row.method == self.rule for row in self.table]
        return as_html(COLUMNS, cells, chosen, self.notes)

    def __repr__(self) -> str:
        return (
            f"Calibrator({self.rule!r}, temperature={self.temperature:.4g}, "
            f"alpha={self.alpha:.4g}, price={self.price:g})"
        )


def variance(alpha: float | Tensor, score: Tensor) -> Tensor:
    """Return v = α m² (B,)."""
    return (alpha * score**POWER).clamp(max=LARGEST_VARIANCE)


def acnml(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) for V = vI."""
    # Beyond what is solved, predictions depend on logits / v alone, nearly: both are scaled down.
    # With v alone cut, the logits of huge inputs would win in the end.
    excess = (var / MOST_SOLVED).clamp(min=1)
    logits, var = logits / excess.unsqueeze(-1), var / excess
    if logits.shape[1] == 2:
        return solve_sigmoid(logits[:, 1] - logits[:, 0], 2 * var)
    return solve_isotropic(logits, var)


def regret_of(log_lik: Tensor) -> Tensor:
    """Return log C(x) (B,) from log p_θ̂_y(y|x) (B, K), without what rounding adds to its limits."""
    return torch.logsumexp(log_lik, dim=-1).clamp(0.0, math.log(log_lik.shape[-1]))


def closed_form(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_y / (p_y + p_y^h (1 - p_y)) (B, K) with h = v / (1 + v)."""
    log_probs = torch.log_softmax(logits, dim=-1)
    h = (var / (1 + var)).unsqueeze(-1)
    # log (1 - p_y); as a sum where 1 - p_y cancels.
    probs = log_probs.exp()
    cancels = probs > 0.5
    others = probs.masked_fill(cancels, 0.0)
    log_others = others.sum(-1, keepdim=True).log().where(cancels, torch.log1p(-others))
    # -log(1 + p_y^(h - 1) (1 - p_y)), a form in which nothing cancels.
    return functional.logsigmoid((1 - h) * log_probs - log_others)


def density_temperature(logits: Tensor, var: Tensor) -> Tensor:
    """Return log softmax(z / (1 + v)) (B, K)."""
    return torch.log_softmax(logits / (1 + var).unsqueeze(-1), dim=-1)


RULES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "closed-form": closed_form,
    "acnml": acnml,
    "density-temperature": density_temperature,
}
assert set(RULES) == set(get_args(RuleName))


def without_answers(logits: Tensor, rows: Tensor) -> Tensor:
    """Return logits (B, ...) that are NaN for some inputs (B,)."""
    rows = rows.to(logits.device).reshape(-1, *[1] * (logits.ndim - 1))
    return logits.masked_fill(rows, torch.nan)


def in_parts(function: Callable[..., Any], *given: Tensor) -> Any:
    """Call a function of places on so many of them at a time; it returns tensors."""
    if torch.compiler.is_compiling() or len(given[0]) <= PLACES_AT_ONCE:
        return function(*given)
    parts = zip(*(each.split(PLACES_AT_ONCE) for each in given), strict=True)
    found = [function(*part) for part in parts]
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(torch.cat(part) for part in zip(*found, strict=True))


def as_arrays(answer: Answer) -> Answer:
    """Return an answer with arrays in place of tensors."""
    arrays: Any = (part.cpu().numpy() for part in answer)
    return Answer(*arrays)
