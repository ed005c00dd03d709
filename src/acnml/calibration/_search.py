"""The search for α: the largest one within a price on the validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from acnml import metrics
from acnml.calibration._validation import ValidationData
from acnml.predictors import Acnml
from acnml.solvers import UnsolvedError

# The search for α ends when the NLL is this close to its limit, as a share of the price.
PRICE_TOLERANCE = 0.02

# α is searched between these; beyond them it makes no difference, or nothing is left to say.
SMALLEST_ALPHA, LARGEST_ALPHA = 1e-8, 1e8

# Data that the search looks at before it looks at all of them.
FIRST_LOOK = 1000

# One-sided 95 % quantile of the normal distribution.
SAMPLING_ERROR = 1.645


@final
@dataclass(frozen=True, eq=False)
class Search:
    """ACNML on the validation data, as a function of α."""

    predictor: Acnml
    validation: ValidationData
    folds: tuple[Acnml, ...]  # of the networks that the validation data were held out from

    def log_lik(self, alpha: float, data: ValidationData | None = None) -> Tensor | None:
        """Return the log-likelihoods (N, K), or None if the solver finds no solution."""
        parts = []
        for index, predictor in enumerate(self.folds):
            features = (data or self.validation).of_fold(index)
            if len(features.logits):
                logits = features.logits / predictor.classifier.temperature
                parts.append((replace(predictor, alpha=alpha), features._replace(logits=logits)))
        try:
            solved = [predictor.solve_features(features) for predictor, features in parts]
        except UnsolvedError:
            return None
        return torch.cat([solution.log_lik.cpu().double() for solution in solved])

    def largest_alpha(self, price: float) -> float:
        """Return the largest α within a price whose accuracy is not lower beyond sampling error.

        A look at some of the data finds α roughly, and a search over all of them refines it.
        """
        some = self.validation.take(slice(0, FIRST_LOOK))
        rough = self._largest(price, self._typical_alpha(), some, steps=12)
        if len(self.validation.labels) <= FIRST_LOOK:
            return rough
        return self._largest(price, rough, self.validation, steps=6)

    def _typical_alpha(self) -> float:
        """Return the α with which a typical logit has a posterior variance of 0.01."""
        predictor, some = self.folds[0], self.validation.of_fold(0).inputs[:100]
        layer = predictor.last_layer
        assert layer is not None
        kernel = predictor.posterior.output_kernel(layer.layer, some.to(predictor.posterior.dtype))
        variance = float(kernel.diagonal().mean()) / predictor.classifier.temperature**2
        return min(max(0.01 / max(variance, 1e-300), SMALLEST_ALPHA), LARGEST_ALPHA)

    def _largest(self, price: float, start: float, data: ValidationData, steps: int) -> float:
        """Bracket the limit from a starting point, then close in on it in log α."""
        low: tuple[float, float] | None = None  # (log α, excess over the limit), within it
        high: tuple[float, float] | None = None  # the same, beyond it
        at = math.log(start)
        factor = 1.0
        bottom, top = math.log(SMALLEST_ALPHA), math.log(LARGEST_ALPHA)
        while low is None or high is None:
            excess = self._excess(math.exp(at), price, data)
            if excess <= 0:
                low = (at, excess)
                if at >= top or -excess <= PRICE_TOLERANCE * price:
                    return math.exp(at)
                at = min(at + factor, top) if high is None else at
            else:
                high = (at, excess)
                if at <= bottom:
                    raise ValueError(
                        f"no alpha costs at most {price:g} nats on the validation data; raise the "
                        "price or give more validation data"
                    )
                at = max(at - factor, bottom) if low is None else at
            factor *= 2
        for step in range(steps):
            (a, fa), (b, fb) = low, high
            # The secant, unless it is useless: every other step halves the bracket.
            share = (
                0.5 if step % 2 or not math.isfinite(fb) else min(max(-fa / (fb - fa), 0.1), 0.9)
            )
            at = a + share * (b - a)
            excess = self._excess(math.exp(at), price, data)
            low, high = ((at, excess), high) if excess <= 0 else (low, (at, excess))
            if excess <= 0 and -excess <= PRICE_TOLERANCE * price:
                break
        return math.exp(low[0])

    def _excess(self, alpha: float, price: float, data: ValidationData) -> float:
        """Return by how much the NLL exceeds its limit; infinite if α is not acceptable at all."""
        log_lik = self.log_lik(alpha, data)
        if log_lik is None:
            return math.inf
        log_probs = torch.log_softmax(log_lik, dim=-1)
        plain = data.tempered(self.validation.temperature)
        if accuracy_is_lower(log_probs, plain, data.labels):
            return math.inf
        return metrics.nll(log_probs, data.labels) - metrics.nll(plain, data.labels) - price


def accuracy_is_lower(log_probs: Tensor, plain: Tensor, labels: Tensor) -> bool:
    """Whether accuracy is lower than that of the plain network, beyond sampling error.

    Only data on which the two disagree count. If both were equally good, the difference of the
    numbers that only one gets right would have the variance of their sum (McNemar 1947).
    """
    correct, before = log_probs.argmax(-1) == labels, plain.argmax(-1) == labels
    lost, won = int((before & ~correct).sum()), int((correct & ~before).sum())
    return lost - won > SAMPLING_ERROR * math.sqrt(lost + won)
