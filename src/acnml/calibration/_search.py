"""The search for α: the largest one within a price on the validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from acnml import metrics
from acnml.calibration._validation import ValidationData
from acnml.predictors import Acnml
from acnml.solvers import UnsolvedError

# The search for α ends when the NLL is this close to its limit, as a share of the price.
PRICE_TOLERANCE = 0.02

# Bounds of the search. A smaller α changes no prediction, a larger one makes all of them uniform.
SMALLEST_ALPHA, LARGEST_ALPHA = 1e-8, 1e8

# At most so many data are in the search's first look, before it looks at all of them.
FIRST_LOOK = 1000

# One-sided 95 % quantile of the normal distribution.
SAMPLING_ERROR = 1.645


@final
@dataclass(frozen=True, eq=False)
class Search:
    """ACNML on the validation data, as a function of α.

    The NLL at some α does not depend on the price, so it is computed once for all prices. The
    log-likelihoods (N, K) take memory: they are kept for the last α within the price only, which is
    the one that a search returns.
    """

    predictor: Acnml
    validation: ValidationData
    folds: tuple[Acnml, ...]  # of the networks that the validation data were held out from
    # α -> NLL, infinite if α is not acceptable at all; for all data and for the first look.
    _nll: dict[tuple[float, bool], float] = field(default_factory=dict, init=False)
    _kept: dict[float, Tensor] = field(default_factory=dict, init=False)  # at most one
    _unsolved: set[float] = field(default_factory=set, init=False)  # α without a solution

    def log_lik(self, alpha: float) -> Tensor | None:
        """Return the log-likelihoods (N, K), or None if the solver finds no solution."""
        kept = self._kept.get(alpha)
        return self._solved(alpha, self.validation) if kept is None else kept

    def _solved(self, alpha: float, data: ValidationData) -> Tensor | None:
        parts = []
        for index, predictor in enumerate(self.folds):
            features = data.of_fold(index)
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
        some = self._first_look
        rough = self._largest(price, self._typical_alpha(), some, reach=1.0, steps=12)
        if some is self.validation:
            return rough
        return self._largest(price, rough, self.validation, reach=0.25, steps=6)

    def why_not_larger(self, alpha: float, price: float) -> str | None:
        """Return what else than the price kept a search from a larger α, or None if nothing did."""
        limit = self.validation.best_nll + price
        tried = {a: nll for (a, is_all), nll in self._nll.items() if is_all}
        beyond = [a for a, nll in tried.items() if a > alpha and nll > limit]
        if not beyond:
            return f"Alpha is at its upper bound of {LARGEST_ALPHA:g}"
        if math.isfinite(tried[min(beyond)]):
            return None
        if min(beyond) in self._unsolved:
            return "The solver finds no solution for a larger alpha"
        return "A larger alpha would lower the accuracy"

    @cached_property
    def _first_look(self) -> ValidationData:
        """Rows at equal distances, because data may be sorted, for example by their labels."""
        stride = math.ceil(len(self.validation.labels) / FIRST_LOOK)
        return self.validation if stride == 1 else self.validation.take(slice(None, None, stride))

    def _typical_alpha(self) -> float:
        """Return the α with which a typical logit has a posterior variance of 0.01."""
        predictor, some = self.folds[0], self.validation.of_fold(0).inputs[:100]
        layer = predictor.last_layer
        assert layer is not None
        kernel = predictor.posterior.output_kernel(layer.layer, some.to(predictor.posterior.dtype))
        variance = float(kernel.diagonal().mean()) / predictor.classifier.temperature**2
        return min(max(0.01 / max(variance, 1e-300), SMALLEST_ALPHA), LARGEST_ALPHA)

    def _largest(
        self, price: float, start: float, data: ValidationData, reach: float, steps: int
    ) -> float:
        """Bracket the limit from a starting point, then close in on it in log α.

        The first step of the bracket is `reach`, and later ones are twice as long each.
        """
        low: tuple[float, float] | None = None  # (log α, excess over the limit), within it
        high: tuple[float, float] | None = None  # the same, beyond it
        at = math.log(start)
        factor = reach
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
        is_all = data is self.validation
        if (alpha, is_all) in self._nll:
            return self._nll[alpha, is_all] - data.best_nll - price
        log_lik = self._solved(alpha, data)
        nll = math.inf if log_lik is None else _acceptable_nll(log_lik, data)
        self._nll[alpha, is_all] = nll
        if is_all and log_lik is None:
            self._unsolved.add(alpha)
        excess = nll - data.best_nll - price
        if is_all and log_lik is not None and excess <= 0:
            self._kept.clear()
            self._kept[alpha] = log_lik
        return excess


def _acceptable_nll(log_lik: Tensor, data: ValidationData) -> float:
    """Return the NLL, infinite if the accuracy is lower than that of the plain network."""
    log_probs = torch.log_softmax(log_lik, dim=-1)
    if accuracy_is_lower(log_probs.argmax(-1) == data.labels, data.correct):
        return math.inf
    return metrics.nll(log_probs, data.labels)


def accuracy_is_lower(correct: Tensor, before: Tensor) -> bool:
    """Whether accuracy is lower than before, beyond sampling error; both (N,) say what is correct.

    Only data on which the two disagree count. If both were equally good, the difference of the
    numbers that only one gets right would have the variance of their sum (McNemar 1947).
    """
    lost, won = int((before & ~correct).sum()), int((correct & ~before).sum())
    return lost - won > SAMPLING_ERROR * math.sqrt(lost + won)
