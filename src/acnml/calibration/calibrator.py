"""The core: (logits, features) of any classifier in, probabilities and a regret out.

No network is needed. `fit_calibrator` learns from arrays what is typical and how much caution may
cost, and a `Calibrator` answers for arrays. `acnml.calibrate` reads the arrays from an `nn.Module`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from acnml._util import batches, checks
from acnml._util.messages import callers_level
from acnml._util.torch_state import one_thread
from acnml.accuracy import expected_accuracy
from acnml.atypicality import Atypicality, Moments
from acnml.calibration.heads import IGNORED, Head, Places, Softmax, Task, as_labels, find_head
from acnml.calibration.rules import RULES, RuleName, regret_of, spread
from acnml.calibration.search import LARGEST, least_nll_temperature
from acnml.calibration.table import (
    COLUMNS,
    EQUAL_PRICE,
    NETWORK,
    TEMPERATURE,
    CalibrationRow,
    as_html,
    as_text,
)
from acnml.calibration.validation import Validation, require_usable, row
from acnml.decisions import Abstention, abstention
from acnml.monitor import Monitor
from acnml.outcomes import By, Outcomes

# Scores tie if they differ by at most this share: rounding differs from batch to batch.
TIE = 1e-5

# Inputs that are counted at a time, and places that are answered at a time.
CHUNK = 4096

# Held-out data may be this much less typical than the training data before a warning.
OVERFIT = 3.0

# Mean total variation below which two methods give the same answers for practical purposes.
SAME_ANSWERS = 0.005


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
        largest: Any = torch.as_tensor(self.probs).amax(-1)
        return largest.numpy() if isinstance(self.probs, np.ndarray) else largest

    def without(self, rows: Tensor) -> Answer:
        """Return the answers without those of some inputs (B,), or places of them."""
        rows = rows.to(self.label.device)
        known = [part.masked_fill(_like(rows, part), torch.nan) for part in self[1:-1]]
        label = self.label.masked_fill(_like(rows, self.label), -1)
        parts: Any = (label, *known, self.abstain | _like(rows, self.abstain))
        return Answer(*parts)


@final
@dataclass(frozen=True, eq=False)
class Calibrator:
    """Calibrated probabilities for logits and features, made by `fit_calibrator`.

    Attributes:
        atypicality: m(x), from the features.
        rule: "closed-form", "acnml" or "density-temperature", see `acnml.calibration.rules`.
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
    >>> labels = (x.sum(1) > 0).long()
    >>> logits = 3 * x[:, :1] * torch.tensor([-1.0, 1.0])
    >>> train, validation = (x[:2000], labels[:2000]), (logits[2000:], x[2000:], labels[2000:])
    >>> calibrator = fit_calibrator(train, validation)
    >>> certificate = calibrator.abstention(risk=0.05).certificates[0]
    >>> certificate.is_certified
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
    head: Head = field(default_factory=Softmax)

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
            known = None if mask is None else as_tensor(mask)
            return as_arrays(self(as_tensor(logits), as_tensor(features), share, by, known))
        with one_thread():
            logits = self.head.expanded(logits.detach())
            flat, score = self.head.flat(logits), self._scores(features.detach(), logits.shape)
            if mask is not None:
                is_text = mask.bool().flatten()
                flat = flat.where(is_text.unsqueeze(1), 0.0)
                score = score.where(is_text, 1.0)
            self._require_finite(flat, score, len(logits))
            pairs = zip(flat.split(CHUNK), score.split(CHUNK), strict=True)
            parts = [self._at_places(*pair, share, by) for pair in pairs]
            joined = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            found = Answer(*(self.head.laid_out(part, logits.shape) for part in joined))
            return found if mask is None else found.without(~mask.bool())

    def _scores(self, features: Tensor, shape: torch.Size) -> Tensor:
        """Return m of all places (P,) of logits of a shape."""
        flat = self.head.flat(features)
        score = torch.cat([self.atypicality(part) for part in flat.split(CHUNK)])
        return (
            self.head.on_positions(score, features.shape, shape) if self.head.positions else score
        )

    def _at_places(self, flat: Tensor, score: Tensor, share: float, by: By) -> Answer:
        """Return the answers for places with logits (P, K) and scores (P,)."""
        log_lik = self._explained(flat, score)
        log_probs = torch.log_softmax(log_lik, dim=-1)
        regret = regret_of(log_lik)
        confidence, limit = log_probs.amax(-1).exp(), self.threshold(share, by)
        is_sure = confidence >= limit * (1 - TIE) if by == "confidence" else regret <= limit + TIE
        # No rule changes the order of the classes, but a huge spread makes them all equal.
        label = self.head.rows(flat).argmax(-1).where(~regret.isnan(), -1)
        rows = label, log_probs.exp(), log_probs, regret, ~is_sure
        *known, abstain = (self.head.per_place(each, flat.shape[1]) for each in rows)
        parts: Any = (*known, score.where(flat.isfinite().all(-1), torch.nan), abstain)
        return Answer(*parts)

    def log_probs(self, logits: Any, features: Any) -> Any:
        """Return the log-probabilities (B, K)."""
        return self(logits, features).log_probs

    def probs(self, logits: Any, features: Any) -> Any:
        """Return the probabilities (B, K)."""
        return self(logits, features).probs

    def regret(self, logits: Any, features: Any) -> Any:
        """Return log C(x) (B,)."""
        return self(logits, features).regret

    def predict(self, logits: Any, features: Any) -> Any:
        """Return the likeliest class of every input (B,), or -1 for one without an answer."""
        return self(logits, features).label

    def threshold(self, share: float, by: By = "confidence") -> float:
        """Return the value beyond which the least certain `share` of the validation data lies.

        Inputs with a confidence below it, or a regret above it, are rejected. On data like the
        validation data that is a share of `share`; on other data usually a larger one.
        """
        limit = self.outcomes.limit(share, by)
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
        wrong at most. Assumptions, and what happens if they are broken: `acnml.decisions`.

        Args:
            risk: largest tolerated error rate among accepted predictions.
            coverage: least tolerated share of accepted predictions.
            confidence: with which the guarantee holds.
            by: what a threshold is put on, "confidence" or "regret".
            by_class: whether every predicted class has a threshold of its own.
        """
        self.head.require_one_row("a guarantee")
        return abstention(self.outcomes, risk, coverage, confidence, by, by_class)

    def expected_accuracy(
        self, logits: Any, features: Any, groups: Any = None, level: float = 0.95
    ) -> Any:
        """Return the accuracy that predictions without labels probably have, with an interval.

        Args:
            logits: as the network returns them (B, K).
            features: of the same inputs.
            groups: a value for every input (B,). Then the result maps each value to an estimate.
                The predicted classes give the precision of every class.
            level: of the interval; what it assumes is in `acnml.accuracy`.
        """
        self.head.require_one_row("an interval")
        confidence = self(logits, features).confidence
        return expected_accuracy(confidence, self.outcomes, level, groups)

    def monitor(self, level: float = 0.01) -> Monitor:
        """Return a monitor of answers, see `acnml.monitor`.

        Args:
            level: largest probability of a false alarm, over the whole life of the monitor.
        """
        self.head.require_one_row("a bound on false alarms")
        return Monitor.of(self.outcomes, level)

    @property
    def temperature_of_equal_price(self) -> float:
        """The plain temperature that costs as much on the validation data."""
        return next(row.temperature for row in self.table if row.method == EQUAL_PRICE)

    def to(self, device: torch.device | str | torch.dtype) -> Calibrator:
        """Return the same calibrator for tensors on a device, or in a precision."""
        return replace(self, atypicality=self.atypicality.to(device))

    def _explained(self, flat: Tensor, score: Tensor) -> Tensor:
        """Return log p_θ̂_y(y|x) of rows (R, C); NaN for places without an answer."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        z, scores = self.head.rows(flat), self.head.per_row(score, flat.shape[1])
        z = z.to(wide) / self.temperature
        log_lik = RULES[self.rule](z, spread(self.alpha, scores).to(wide))
        fine = z.isfinite().all(-1) & scores.isfinite()
        return log_lik.where(fine.unsqueeze(-1), torch.nan)

    def _require_finite(self, flat: Tensor, score: Tensor, inputs: int) -> None:
        """Raise an error about inputs without an answer, unless they are to be flagged."""
        fine = flat.isfinite().all(-1) & score.isfinite()
        if self.on_error == "raise" and not bool(fine.all()):
            rows = (~fine.reshape(inputs, -1).all(-1)).nonzero().flatten().tolist()
            raise checks.RowsError(
                "logits or features are NaN or infinite",
                rows,
                inputs,
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
        price: accepted increase of the validation NLL over the best temperature, in nats. A higher
            price gives less confident predictions.
        rule: "closed-form" or "acnml"; "density-temperature" is a baseline without a regret.
        temperature: of the logits; by default that of least validation NLL. The price is counted
            from the NLL at this temperature.
        on_error: what the result does about inputs without an answer, see `Calibrator`.
        task: "multilabel" for several labels per input; "dense" for maps, "tokens" for texts. By
            default what the shape of the labels says, see `acnml.calibration.heads`.
        ignore_index: label of positions that do not count.

    >>> from acnml import fit_calibrator
    >>> features = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (features[:, 0] + 0.5 * features[:, 1] > 0).long()
    >>> logits = 3 * features[:, :1] * torch.tensor([-1.0, 1.0])  # of a classifier that is too sure
    >>> calibrator = fit_calibrator(
    ...     (features[:1000], labels[:1000]), (logits[1000:], features[1000:], labels[1000:])
    ... )
    >>> calibrator.probs(logits[:3], features[:3]).shape
    torch.Size([3, 2])
    """
    require_settings(price, rule)
    logits, features, labels = (as_tensor(part) for part in validation)
    head = find_head(logits.shape, labels, task, ignore_index)
    generator = torch.Generator("cpu").manual_seed(0)
    places = head.read(logits, features, as_labels(labels), generator=generator)
    return fit_places(head, train, places, price, rule, temperature, on_error)


def require_settings(price: float, rule: str) -> None:
    """Raise an error for a price or a rule that does not exist, before the network runs."""
    checks.require_positive(price, "price")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, got {rule!r}")


def fit_places(
    head: Head,
    train: tuple[Any, Any] | Moments | Atypicality,
    places: Places,
    price: float,
    rule: RuleName,
    temperature: float | None,
    on_error: Literal["raise", "flag"],
) -> Calibrator:
    """Calibrate from what was read at places of the validation data."""
    size, given = places.logits.shape[1], places.features
    assert places.labels is not None
    labels = head.row_labels(places.labels)
    logits = head.rows(places.logits)
    require_usable(logits, labels, temperature is not None)
    score = _atypicality(train, head, places)
    chosen = least_nll_temperature(logits, labels) if temperature is None else temperature
    checks.require_positive(chosen, "temperature")
    with one_thread():
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores = head.per_row(given if given.ndim == 1 else score(given), size)
        inputs = head.per_row(places.inputs, size)
        data = Validation(logits.to(wide) / chosen, scores, labels, inputs)
        found = _chosen(score, data, chosen, price, rule, on_error)
        return replace(found, head=head)


def _atypicality(train: Any, head: Head, places: Places) -> Atypicality:
    """Return the score from training data, in any form, and from validation data."""
    if isinstance(train, Atypicality):
        return train
    size, features = places.logits.shape[1], places.features
    moments = train if isinstance(train, Moments) else _moments(train, head, size)
    assert places.labels is not None
    return Atypicality.fit(moments, features, head.groups(places.labels, len(features)))


def _moments(train: tuple[Any, Any], head: Head, size: int) -> Moments:
    """Return the moments of training features with labels."""
    given, labels = map(as_tensor, train)
    if len(given) != len(labels):
        raise ValueError(f"there are {len(given)} training inputs, but {len(labels)} labels")
    features, moments = head.flat(given), Moments(head.group_count(size))
    groups = head.groups(as_labels(labels), len(features))
    counts = groups != head.ignored
    parts = zip(features[counts].split(CHUNK), groups[counts].split(CHUNK), strict=True)
    for part, own in parts:
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


def _like(rows: Tensor, values: Tensor) -> Tensor:
    """Return (B,), or (B, T), in the number of dimensions of values (B, ...)."""
    return rows.reshape(*rows.shape, *[1] * (values.ndim - rows.ndim))


def as_tensor(array: Any) -> Tensor:
    """Turn an array, or a list of numbers, into a tensor."""
    found = batches.as_tensor(array, "an array")
    return found if isinstance(found, Tensor) else torch.as_tensor(found, device="cpu")


def as_arrays(answer: Answer) -> Answer:
    """Return an answer with arrays in place of tensors."""
    arrays: Any = (part.cpu().numpy() for part in answer)
    return Answer(*arrays)
