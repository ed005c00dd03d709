"""How a calibrator is chosen on validation data: a temperature, a score, and a knob at a price."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._engine.trust import are_probabilities
from acnml._util import checks
from acnml._util.arrays import as_values
from acnml._util.messages import callers_level
from acnml._util.torch_state import one_thread
from acnml.atypicality import Atypicality, Moments
from acnml.calibration.calibrator import (
    PLACES_AT_ONCE,
    RULES,
    Calibrator,
    RuleName,
    regret_of,
    variance,
)
from acnml.calibration.heads import IGNORED, Cases, Head, Task, as_labels, find_head
from acnml.calibration.search import (
    FACTOR,
    LARGEST,
    largest_at_price,
    least_nll_temperature,
    rows_in_cache,
)
from acnml.calibration.table import EQUAL_PRICE, NETWORK, TEMPERATURE, CalibrationRow
from acnml.decisions import Outcomes

# Fewer data than this say too little about an NLL to choose anything by it.
LEAST_DATA = 50

# With an NLL above this share of that of the labels' frequencies, a network explains nothing.
UNEXPLAINED = 0.98

# Logits that spread this many times as far as those of the median input are suspicious.
EXTREME = 100

# The search begins on so many logits, before all data are used.
SEARCHED = 2**17

# A rule that solves equations. As a rival of the chosen one, it is searched on some of many data.
SOLVED = "acnml"

# First steps from the knob that some of the data have chosen.
START_FACTOR = 1.2

# Held-out data may be this much less typical than the training data before a warning.
OVERFIT = 3.0

# Mean total variation below which two methods give the same answers for practical purposes.
SAME_ANSWERS = 0.005


def fit_calibrator(
    train: tuple[Any, Any] | Moments | Atypicality,
    validation: tuple[Any, Any, Any],
    *,
    price: float = 0.01,
    rule: RuleName = "closed-form",
    temperature: float | None = None,
    on_error: Literal["raise", "flag"] = "raise",
    task: Task | None = None,
    ignore_index: int = IGNORED,
) -> Calibrator:
    """Calibrate any classifier from arrays: its logits, features of its inputs, and labels.

    Args:
        train: features (N, q) and classes (N,) of the training data, or their `Moments`, which can
            be summed over parts of the data, or an `Atypicality` that was fitted to them.
        validation: logits (N, K), features (N, q) and classes (N,) of data like the training data
            that the classifier was not trained on. With an `Atypicality`, scores m (N,) can stand
            for the features: those of a cross-validation, each from the data of other folds.
        price: accepted increase of the validation NLL. See `acnml.calibrate`, also for the others.
        rule: "closed-form", "acnml" or "density-temperature".
        temperature: of the logits; by default that of least validation NLL.
        on_error: "raise" or "flag".
        task: "multilabel", "dense" or "tokens".
        ignore_index: label of positions that do not count.

    >>> from acnml import fit_calibrator
    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))  # features
    >>> labels = (x.sum(1) > 0).long()
    >>> logits = 3 * x[:, :1] * torch.tensor([-1.0, 1.0])  # of a classifier that is too sure
    >>> calibrator = fit_calibrator((x[:999], labels[:999]), (logits[999:], x[999:], labels[999:]))
    >>> calibrator.probs(logits[:3], x[:3]).shape
    torch.Size([3, 2])
    """
    require_settings(price, rule)
    logits, features, labels = (as_values(part) for part in validation)
    head = find_head(logits.shape, labels, task, ignore_index)
    generator = torch.Generator("cpu").manual_seed(0)
    cases = head.read(logits, features, as_labels(labels), generator=generator)
    return fit_cases(head, train, cases, price, rule, temperature, on_error)


def require_settings(price: float, rule: str) -> None:
    """Raise an error for a price or a rule that does not exist, before the network runs."""
    checks.require_positive(price, "price")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, got {rule!r}")


def fit_cases(
    head: Head,
    train: tuple[Any, Any] | Moments | Atypicality,
    cases: Cases,
    price: float,
    rule: RuleName,
    temperature: float | None,
    on_error: Literal["raise", "flag"],
) -> Calibrator:
    """Calibrate from what was read at places of the validation data."""
    assert cases.labels is not None
    labels = cases.labels.flatten()
    logits, inputs = head.rows(cases.logits, cases.inputs)
    require_usable(logits, labels, temperature is not None)
    score, given = _atypicality(train, head, cases), cases.features
    chosen = least_nll_temperature(logits, labels) if temperature is None else temperature
    checks.require_positive(chosen, "temperature")
    with one_thread():
        _, scores = head.rows(cases.logits, given if given.ndim == 1 else score(given))
        wide = torch.promote_types(logits.dtype, torch.float32)
        data = Validation(logits.to(wide) / chosen, scores, labels, inputs)
        found = _chosen(score, data, chosen, price, rule, on_error)
        return replace(found, head=head)


def _atypicality(train: Any, head: Head, cases: Cases) -> Atypicality:
    """Return the score from training data, in any form, and from validation data."""
    if isinstance(train, Atypicality):
        return train
    size, features = cases.logits.shape[1], cases.features
    moments = train if isinstance(train, Moments) else _moments(train, head, size)
    assert cases.labels is not None
    return Atypicality.fit(moments, features, head.groups(cases.labels, len(features)))


def _moments(train: tuple[Any, Any], head: Head, size: int) -> Moments:
    """Return the moments of training features with labels."""
    given, labels = map(as_values, train)
    if len(given) != len(labels):
        raise ValueError(f"there are {len(given)} training inputs, but {len(labels)} labels")
    features, moments = head.flat(given), Moments(head.group_count(size))
    groups = head.groups(as_labels(labels), len(features))
    counts = groups != head.ignored
    each = (kept[counts].split(PLACES_AT_ONCE) for kept in (features, groups))
    for part, own in zip(*each, strict=True):
        moments.add(part, own)
    return moments


def _chosen(
    score: Atypicality,
    data: Validation,
    temperature: float,
    price: float,
    rule: RuleName,
    on_error: Literal["raise", "flag"],
) -> Calibrator:
    """Choose α, and write down what it was chosen from."""
    rows, log_liks = list[CalibrationRow](), dict[str, Tensor]()
    own = data.alpha_at(rule, price)
    for each in RULES:
        alpha = own if each == rule else data.alpha_of_rival(each, rule, own, price)
        log_liks[each] = data.log_lik(each, alpha)
        rows.append(row(each, temperature, log_liks[each], data.labels, alpha))
    chosen = next(each for each in rows if each.method == rule)
    assert chosen.alpha is not None
    # A fair rival costs what the rule costs, also where the rule cannot spend the whole price.
    equal = data.temperature_at(min(price, chosen.nll - data.nll))
    plain = [
        row(NETWORK, 1.0, data.tempered(1 / temperature), data.labels),
        row(TEMPERATURE, temperature, data.tempered(1.0), data.labels),
        row(EQUAL_PRICE, temperature * equal, data.tempered(equal), data.labels),
    ]
    log_probs = torch.log_softmax(log_liks[rule], dim=-1)
    notes = _notes(score, data, chosen, price, log_probs, data.tempered(equal))
    return Calibrator(
        atypicality=score,
        rule=rule,
        temperature=temperature,
        alpha=chosen.alpha,
        price=price,
        table=(*plain, *rows),
        notes=notes,
        outcomes=Outcomes.of(
            label=data.labels,
            predicted=data.logits.argmax(-1),
            confidence=log_probs.amax(-1).exp(),
            regret=regret_of(log_liks[rule]),
            score=data.score,
        ),
        on_error=on_error,
    )


def _notes(
    score: Atypicality,
    data: Validation,
    chosen: CalibrationRow,
    price: float,
    log_probs: Tensor,
    rival: Tensor,
) -> tuple[str, ...]:
    """Say what was chosen and what is doubtful; warn of what should not go unread."""
    added = (data.tempered(1.0) - log_probs).gather(1, data.labels.unsqueeze(1)).squeeze(1)
    error, inputs = data.standard_error(added), len(data.inputs.unique())
    count = f"{len(added)} labels of {inputs}" if len(added) > inputs else f"{inputs}"
    notes = [
        f"Chosen: temperature {chosen.temperature:.3g}, then {chosen.method} with alpha = "
        f"{chosen.alpha:.4g}. On {count} validation examples this costs {float(added.mean()):.4f} "
        f"± {error:.4f} nats of NLL.",
        f"Atypicality: {len(score.mean)} features, {len(score.directions)} directions, shrinkage "
        f"{score.shrinkage:.2g}.",
    ]
    variation = float((log_probs.exp() - rival.exp()).abs().sum(-1).mean()) / 2
    if variation < SAME_ANSWERS:
        notes.append(
            "A plain temperature of equal price gives nearly the same predictions on these data: "
            f"probabilities differ by {variation:.4f} on average (total variation)."
        )
    doubts = []
    if not data.explains_labels:
        doubts.append(
            f"The network says hardly more about the validation labels than how frequent they are "
            f"(NLL {data.nll:.3g} at temperature {chosen.temperature:.3g}): check that the labels "
            "belong to the inputs, and that the classes are in the order of the network's outputs."
        )
    if chosen.alpha == LARGEST:
        doubts.append(
            f"All caution costs less than {price:g} nats, so the price sets no limit: "
            "check that the labels belong to the inputs, or lower the price."
        )
    if error > price:
        doubts.append(
            f"The price of {price:g} nats is known only to ± {error:.4f} from {count} validation "
            "examples: give more of them, or a higher price."
        )
    if score.overfit > OVERFIT:
        doubts.append(
            f"Held-out features are {score.overfit:.1f} times as far from their classes as the "
            "training features: give more training data, or fewer features."
        )
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=callers_level())
    return (*notes, *doubts)


@final
@dataclass(frozen=True, eq=False)
class Validation:
    """Logits z / T (N, K), scores m (N,), classes (N,) and inputs (N,) of the validation data.

    Rows of the same input, such as pixels of an image, are no independent data.
    """

    logits: Tensor
    score: Tensor
    labels: Tensor
    inputs: Tensor

    @cached_property
    def nll(self) -> float:
        """The NLL at the temperature."""
        return metrics.nll(self.tempered(1.0), self.labels)

    @property
    def explains_labels(self) -> bool:
        """Whether the network knows more about the labels than how frequent they are."""
        shares = torch.bincount(self.labels).double() / len(self.labels)
        return self.nll < UNEXPLAINED * float(-torch.xlogy(shares, shares).sum())

    def tempered(self, temperature: float) -> Tensor:
        """Return the log-probabilities (N, K) at another temperature, as a multiple of T."""
        return torch.log_softmax(self.logits.double() / temperature, dim=-1)

    def log_lik(self, rule: str, alpha: float) -> Tensor:
        """Return how well every label is explained (N, K)."""
        return RULES[rule](self.logits, variance(alpha, self.score)).double()

    def added_nll(self, rule: str, alpha: float) -> float:
        """Return by how much the NLL of a rule is above that of T."""
        return self._mean(rule, alpha, lambda _, log_probs, y: -log_probs.gather(1, y)) - self.nll

    def divergence(self, rule: str, alpha: float) -> float:
        """Return the mean Kullback-Leibler divergence of a rule from softmax(z / T).

        That is the NLL which it would add, if these probabilities were those of the labels.
        """

        def added(logits: Tensor, log_probs: Tensor, _: Tensor) -> Tensor:
            plain = torch.log_softmax(logits.double(), -1)
            return plain.exp() * (plain - log_probs)

        return self._mean(rule, alpha, added)

    def _mean(self, rule: str, alpha: float, cost: Callable[..., Tensor]) -> float:
        """Return the mean cost of logits, a rule's log-probabilities and labels."""
        total, rows = 0.0, rows_in_cache(self.logits)
        parts = (each.split(rows) for each in (self.logits, self.score, self.labels.unsqueeze(1)))
        for logits, score, labels in zip(*parts, strict=True):
            log_probs = torch.log_softmax(RULES[rule](logits, variance(alpha, score)).double(), -1)
            total += float(cost(logits, log_probs, labels).sum())
        return total / len(self.labels)

    def alpha_at(self, rule: str, price: float) -> float:
        """Return the largest α, nearly, whose NLL is at most `price` above that of T."""
        some = self._some
        start, factor = (some.alpha_at(rule, price), START_FACTOR) if some else (1.0, FACTOR)
        return largest_at_price(partial(self.added_nll, rule), price, start, factor)

    def alpha_of_rival(self, rival: str, rule: str, alpha: float, price: float) -> float:
        """Return the α at which a rival costs as much as a rule, nearly.

        With many data, a rival that solves equations is brought as far from softmax(z / T) as the
        rule is, on some of the data: its cost is then close to the price, and stated in the table.
        """
        some = self._some
        if some is None or rival != SOLVED:
            return self.alpha_at(rival, price)
        divergence = partial(some.divergence, rival)
        return largest_at_price(divergence, some.divergence(rule, alpha), alpha)

    def temperature_at(self, price: float) -> float:
        """Return the largest temperature, as a multiple of T, that costs at most the price."""
        plain = replace(self, score=torch.ones_like(self.score))
        return 1 + plain.alpha_at("density-temperature", price) if price > 0 else 1.0

    @cached_property
    def _some(self) -> Validation | None:
        """Some of the data, drawn at random; None if there are not many."""
        count = max(LEAST_DATA, SEARCHED // self.logits.shape[1])
        if count >= len(self.labels) // 2:
            return None
        generator = torch.Generator("cpu").manual_seed(0)
        rows = torch.randperm(len(self.labels), generator=generator, device="cpu")[:count]
        parts = self.logits, self.score, self.labels, self.inputs
        return Validation(*(part[rows] for part in parts))

    def standard_error(self, values: Tensor) -> float:
        """Return the standard error of the mean of values (N,), from sums over inputs."""
        sums = torch.bincount(self.inputs, weights=values - values.mean())
        inputs = len(self.inputs.unique())
        return float(sums.square().sum().sqrt()) / len(values) * math.sqrt(inputs / (inputs - 1))


def row(
    method: str,
    temperature: float,
    log_lik: Tensor,
    labels: Tensor,
    alpha: float | None = None,
) -> CalibrationRow:
    """Return the scores of a method from its log-likelihoods (N, K), normalised or not."""
    log_probs = torch.log_softmax(log_lik, dim=-1)
    return CalibrationRow(
        method,
        temperature,
        alpha,
        **metrics.summary(log_probs, labels),
        confidence=float(log_probs.amax(-1).exp().mean()),
        regret=None if alpha is None else float(torch.logsumexp(log_lik, -1).clamp(min=0).mean()),
    )


def require_usable(logits: Tensor, labels: Tensor, has_temperature: bool) -> None:
    """Refuse validation data that cannot be calibrated on, and warn of data that are doubtful."""
    count, classes = logits.shape
    if count < (2 if has_temperature else LEAST_DATA):
        raise ValueError(
            f"{count} validation examples are too few to choose a temperature and a price by; give "
            f"at least {LEAST_DATA}, better a few thousand, or set temperature=1"
        )
    if count < LEAST_DATA:
        _warn(
            f"{count} validation examples say little about thresholds: give at least {LEAST_DATA}"
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"validation labels go from {int(labels.min())} to {int(labels.max())}, but there are "
            f"{classes} logits: labels must be class indices from 0 to {classes - 1}"
        )
    if are_probabilities(logits):
        raise ValueError(
            "the logits are probabilities: pass their logarithms, or remove the softmax"
        )
    missing = sorted(set(range(classes)) - set(labels.unique().tolist()))
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        _warn(f"{len(missing)} of {classes} classes have no validation data: {shown}")
    wide = (logits.amax(-1) - logits.amin(-1)).double()
    rows = (wide > EXTREME * wide.median()).nonzero().flatten().tolist()
    if rows and float(wide.median()) > 0:
        _warn(
            f"{len(rows)} validation examples have logits more than {EXTREME} times as large as "
            f"usual (first at index {rows[0]}) and can decide the temperature alone: check them"
        )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=callers_level())
