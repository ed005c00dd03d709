"""Outputs of the networks on the validation data, from which temperature and α are chosen."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._engine.trust import require_logits
from acnml._util import checks
from acnml._util.callers import callers_level
from acnml._util.processes import Group
from acnml.classifier import Classifier
from acnml.head.features import Features
from acnml.tuning.temperature import least_nll_temperature
from acnml.typicality import Density, Reader, Typicality
from acnml.typicality.mahalanobis import Moments

# At a higher temperature, all predictions are uniform.
LARGEST_TEMPERATURE = 1e8

# Logits that spread this many times as far as those of the median input are suspicious.
EXTREME = 100

# Fewer validation data than this say too little about an NLL to choose anything by it.
LEAST_DATA = 50


class Outputs(NamedTuple):
    """What a network makes of validation data."""

    features: Features
    labels: Tensor
    reader: Reader | None  # of features at other places

    def of_first_process(self, group: Group) -> Outputs:
        """Return the outputs of the first process, so that all processes choose the same.

        All must have the same validation data. Their outputs may differ by rounding.
        """
        if not group.agree(self.labels):
            raise ValueError(
                "the processes have different validation data: pass all validation data, in the "
                "same order, in every process; only the training data are split"
            )
        inputs, logits, observed = self.features
        shared = None if observed is None else group.share(observed)
        features = Features(group.share(inputs), group.share(logits), shared)
        if self.reader is None:
            return Outputs(features, self.labels, None)
        reader = replace(
            self.reader,
            shift=group.share(self.reader.shift),
            scale=group.share(self.reader.scale),
        )
        return Outputs(features, self.labels, reader)


@final
@dataclass(frozen=True, eq=False)
class ValidationData:
    """What the network makes of the validation data."""

    features: Features  # without a temperature
    labels: Tensor
    fold: Tensor  # (N,) which network the features are of, in ascending order
    temperature: float  # of least NLL, or given
    reader: Reader | None  # of features at other places

    @staticmethod
    def of(parts: list[Outputs], temperature: float | None) -> ValidationData:
        """Join the outputs of the networks of all folds, and choose the temperature."""
        features, labels = Features.joined([p.features for p in parts]), [p.labels for p in parts]
        sizes = torch.tensor([len(y) for y in labels], device="cpu")
        fold = torch.arange(len(parts), device="cpu").repeat_interleave(sizes)
        require_usable(features.logits, torch.cat(labels), temperature)
        if temperature is None:
            log_probs = torch.log_softmax(features.logits.cpu().double(), dim=-1)
            temperature = least_nll_temperature(log_probs, torch.cat(labels))
        checks.require_positive(temperature, "temperature")
        return ValidationData(
            features, torch.cat(labels), fold, float(temperature), parts[0].reader
        )

    def density(self, classifier: Classifier, moments: Moments) -> Typicality | None:
        """Return the typicality for moments of the training data, if features were read."""
        if self.reader is None or self.features.observed is None:
            return None
        return Typicality.of_moments(classifier, self.reader, moments, self.features.observed)

    def observed_by(self, density: Density | None) -> ValidationData:
        """Return the data with s(x) in place of the features that it is computed from."""
        if density is None or self.features.observed is None:
            return self
        score = density.score(self.features.observed)
        return replace(self, features=self.features._replace(observed=score))

    def tempered(self, temperature: float) -> Tensor:
        """Return the log-probabilities (N, K) of the network at a temperature."""
        return torch.log_softmax(self.features.logits.cpu().double() / temperature, dim=-1)

    def take(self, rows: slice) -> ValidationData:
        """Return some of the data."""
        features = self.features.take(rows)
        return replace(self, features=features, labels=self.labels[rows], fold=self.fold[rows])

    def of_fold(self, index: int) -> Features:
        """Return the features that are of one network."""
        if bool((self.fold == index).all()):
            return self.features
        rows = (self.fold == index).nonzero().flatten().to(self.features.logits.device)
        return self.features.take(rows)

    @property
    def best_nll(self) -> float:
        """The NLL of the tempered network."""
        return self._plain[0]

    @property
    def correct(self) -> Tensor:
        """(N,) where the tempered network is right."""
        return self._plain[1]

    @cached_property
    def _plain(self) -> tuple[float, Tensor]:
        """NLL and correctness of the tempered network: two small results of an (N, K) softmax."""
        log_probs = self.tempered(self.temperature)
        return metrics.nll(log_probs, self.labels), log_probs.argmax(-1) == self.labels

    def temperature_of_price(self, price: float) -> float:
        """Return the T above the best one whose NLL is `price` higher; a huge one if none is."""
        limit = self.best_nll + price
        if math.log(self.features.logits.shape[1]) <= limit:  # even uniform predictions are cheaper
            return LARGEST_TEMPERATURE
        low, high = math.log(self.temperature), math.log(self.temperature) + 1
        top = math.log(LARGEST_TEMPERATURE)
        while high < top and metrics.nll(self.tempered(math.exp(high)), self.labels) < limit:
            high += 1
        for _ in range(40):
            middle = (low + high) / 2
            within = metrics.nll(self.tempered(math.exp(middle)), self.labels) <= limit
            low, high = (middle, high) if within else (low, middle)
        return math.exp(low)


def require_usable(logits: Tensor, labels: Tensor, temperature: float | None) -> None:
    """Refuse validation data that cannot be calibrated on, and warn of data that are doubtful."""
    n, classes = logits.shape
    if n < (LEAST_DATA if temperature is None else 2):
        raise ValueError(
            f"{n} validation examples are too few to choose a temperature and a price by; give at "
            f"least {LEAST_DATA}, better a few thousand, or set temperature=1"
        )
    require_logits(logits)
    _warn_of_extreme(logits)
    missing = sorted(set(range(classes)) - set(labels.unique().tolist()))
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {classes} classes have no validation data ({shown}): alpha is "
            "chosen without them. Add validation data for these classes",
            stacklevel=callers_level(),
        )


def _warn_of_extreme(logits: Tensor) -> None:
    """Warn of inputs that alone could decide the temperature and the score of typicality."""
    spread = (logits.amax(-1) - logits.amin(-1)).double()
    rows = (spread > EXTREME * spread.median()).nonzero().flatten().tolist()
    if rows and spread.median() > 0:
        listed = ", ".join(map(str, rows[: checks.LISTED])) + (
            ", …" if rows[checks.LISTED :] else ""
        )
        warnings.warn(
            f"{len(rows)} of {len(logits)} validation examples have logits more than {EXTREME} "
            f"times as large as usual (index {listed}). They can decide the temperature and alpha "
            "alone: check these inputs, for example for missing values coded as numbers",
            stacklevel=callers_level(),
        )
