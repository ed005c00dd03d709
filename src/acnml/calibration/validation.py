"""Validation data: what every method scores on them, and the knob of a rule at a price."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import final

import torch
from torch import Tensor

from acnml import metrics
from acnml._util.messages import callers_level
from acnml.calibration.rules import RULES, spread
from acnml.calibration.search import FACTOR, largest_at_price, rows_in_cache
from acnml.calibration.table import CalibrationRow

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
CLOSE = 1.2


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
        return RULES[rule](self.logits, spread(alpha, self.score)).double()

    def added_nll(self, rule: str, alpha: float) -> float:
        """Return by how much the NLL of a rule is above that of T."""

        def nll(_: Tensor, log_probs: Tensor, labels: Tensor) -> Tensor:
            return -log_probs.gather(1, labels.unsqueeze(1)).sum()

        return self._mean(nll, rule, alpha) - self.nll

    def divergence(self, rule: str, alpha: float) -> float:
        """Return the mean Kullback-Leibler divergence of a rule from softmax(z / T).

        That is the NLL which it would add, if these probabilities were those of the labels.
        """

        def added(logits: Tensor, log_probs: Tensor, _: Tensor) -> Tensor:
            plain = torch.log_softmax(logits.double(), -1)
            return (plain.exp() * (plain - log_probs)).sum()

        return self._mean(added, rule, alpha)

    def _mean(self, total: Callable[..., Tensor], rule: str, alpha: float) -> float:
        """Return the mean of a function of logits, a rule's log-probabilities, and labels."""
        rows, found = rows_in_cache(self.logits), 0.0
        parts = (each.split(rows) for each in (self.logits, self.score, self.labels))
        for logits, score, labels in zip(*parts, strict=True):
            log_lik = RULES[rule](logits, spread(alpha, score)).double()
            found += float(total(logits, torch.log_softmax(log_lik, -1), labels))
        return found / len(self.labels)

    def alpha_at(self, rule: str, price: float, start: float = 1.0) -> float:
        """Return the largest α, nearly, whose NLL is at most `price` above that of T."""
        some, factor = self._some, FACTOR
        if some is not None:
            start, factor = some.alpha_at(rule, price, start), CLOSE
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
        if price <= 0:
            return 1.0
        some, rule = self._some, "density-temperature"
        plain = replace(self, score=torch.ones_like(self.score))
        start, factor = (1.0, FACTOR) if some is None else (some.temperature_at(price) - 1, CLOSE)
        return 1 + largest_at_price(partial(plain.added_nll, rule), price, start, factor)

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
    if _are_probabilities(logits):
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


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether all rows (N, K) are non-negative and sum to one, up to rounding."""
    tolerance = torch.finfo(outputs.dtype).eps * max(16, outputs.shape[1])
    sums = outputs.double().sum(-1)
    return bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= tolerance).all())


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=callers_level())
