"""Validation data: what every method scores on them, and the knob of a rule at a price."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from acnml import metrics
from acnml._util.callers import callers_level
from acnml.calibration.rules import RULES, spread
from acnml.calibration.search import FACTOR, largest_at_price
from acnml.calibration.table import CalibrationRow

# Fewer data than this say too little about an NLL to choose anything by it.
LEAST_DATA = 50

# With an NLL above this share of that of the labels' frequencies, a network explains nothing.
UNEXPLAINED = 0.98

# Logits that spread this many times as far as those of the median input are suspicious.
EXTREME = 100

# The search begins on so many logits, before all data are used.
SEARCHED = 2**19

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

    def alpha_at(self, rule: str, price: float) -> float:
        """Return the largest α, nearly, whose NLL is at most `price` above that of T."""
        first = max(LEAST_DATA, SEARCHED // self.logits.shape[1])
        is_large = first < len(self.labels) // 2
        start = self._some(first).alpha_at(rule, price) if is_large else 1.0

        def cost(alpha: float) -> float:
            log_probs = torch.log_softmax(self.log_lik(rule, alpha), dim=-1)
            return metrics.nll(log_probs, self.labels) - self.nll

        return largest_at_price(cost, price, start, CLOSE if is_large else FACTOR)

    def temperature_at(self, price: float) -> float:
        """Return the largest temperature, as a multiple of T, that costs at most the price."""

        def cost(excess: float) -> float:
            return metrics.nll(self.tempered(1 + excess), self.labels) - self.nll

        return 1 + (largest_at_price(cost, price) if price > 0 else 0.0)

    def _some(self, count: int) -> Validation:
        """Return some of the data, drawn at random."""
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
