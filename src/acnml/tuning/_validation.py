"""Validation: predictions for a validation set, with as few passes over it as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._engine.last_layer import Features, all_features
from acnml._engine.layers import Site
from acnml._util.batches import NO_LABELS, Inputs, as_loader, split_labels
from acnml._util.passes import each_batch
from acnml.classifier import Classifier, log_softmax
from acnml.fit.batches import require_classes
from acnml.predictors import Acnml, Ensemble, Map, Modes, Predictor
from acnml.predictors.ensemble import log_mean
from acnml.problem import Problem
from acnml.solution import Solution

T = TypeVar("T")

# Numbers in the covariances of the logits that are kept from one α to the next.
MOST_KEPT = 2**25


class _Layer(NamedTuple):
    """A Linear layer of a network."""

    network: Classifier
    site: Site

    @staticmethod
    def of(predictor: Predictor) -> _Layer | None:
        """Return the last layer if it is all that a predictor adapts, else None."""
        if not isinstance(predictor, Acnml) or predictor.last_layer is None:
            return None
        network = predictor.classifier.at(predictor.posterior.mean)
        return _Layer(network, predictor.last_layer)

    def features(self, x: Inputs) -> Features | None:
        """Return the inputs and outputs of the layer for a batch."""
        return all_features(self.network, self.site, self.network.prepare(x))

    def agrees_with(self, other: _Layer) -> bool:
        """Whether another layer has the same features for all inputs."""
        return self.site.name == other.site.name and self.network.agrees_with(other.network)


class _Cached(NamedTuple):
    """The inputs and outputs of one layer, for all data."""

    layer: _Layer
    number: int  # of the pass over the data
    features: Features | None  # None if the logits are not the outputs of the layer
    labels: Tensor


class _Linearised(NamedTuple):
    """The logits of all data and their covariance, for α = 1."""

    predictor: Acnml
    problem: Problem | None  # None if it takes too much memory
    labels: Tensor

    def serves(self, other: Acnml) -> bool:
        """Whether another predictor has the same problem, but for α."""
        if other.posterior is not self.predictor.posterior:
            return False
        return other.classifier.agrees_with(self.predictor.classifier)


@final
class Validation:
    """A labelled validation set, with a cache of its features.

    If predictors differ only in the posterior of the last layer or in α, their predictions can be
    computed from the features, that is the inputs and outputs of that layer. If they differ in α
    alone, the logits and their covariance are enough, whatever layers the posterior covers. Both
    are computed in one pass and cached, so a search needs only one pass for any number of values.

    Args:
        loader: validation data, with labels.
        progress: whether to show progress bars; by default only in a terminal.
    """

    def __init__(self, loader: Iterable[Any], progress: bool | None = None) -> None:
        self._loader, self._progress = as_loader(loader), progress
        self._cache: list[_Cached] = []
        self._problems: list[_Linearised] = []

    def predictions(self, predictor: Predictor, description: str) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (N, K) and labels (N,) of all data, on the CPU."""
        members = predictor.predictors if isinstance(predictor, (Ensemble, Modes)) else (predictor,)
        found = self._solutions(members)
        if found is not None:
            solutions, labels = found
            if isinstance(predictor, Modes):
                log_lik = predictor.combined([one.log_lik.cpu() for one in solutions])
                return torch.log_softmax(log_lik, dim=-1), labels
            return log_mean([one.log_probs.cpu() for one in solutions]), labels
        if isinstance(predictor, Map):
            for known in self._cache:
                network = known.layer.network
                if known.features is not None and network.agrees_with(predictor.classifier):
                    return log_softmax(known.features.logits).cpu(), known.labels
        if isinstance(predictor, Acnml) and predictor.logit_solver is not None:
            known_problem = self._problem(predictor)
            if known_problem.problem is not None:
                solution = predictor.solve_problem(known_problem.problem)
                return solution.log_probs.cpu(), known_problem.labels
        return self.over_batches(description, lambda x: predictor(x), torch.cat)

    def _problem(self, predictor: Acnml) -> _Linearised:
        """Return the problem of all data, from one pass."""
        for known in self._problems:
            if known.serves(predictor):
                return known
        left = MOST_KEPT

        def compute(x: Inputs) -> Problem | None:
            nonlocal left
            problem = predictor.problem(x) if left > 0 else None
            left -= 0 if problem is None else problem.logits.shape[1] * problem.logits.numel()
            return problem

        def join(parts: list[Problem | None]) -> Problem | None:
            found = [part for part in parts if part is not None]
            return Problem.joined(found) if left > 0 else None

        new = _Linearised(predictor, *self.over_batches("Jacobians", compute, join))
        self._problems.append(new)
        return new

    def prepare(self, predictor: Acnml) -> None:
        """Compute the features for a predictor, if it adapts only the last layer."""
        layer = _Layer.of(predictor)
        if layer is not None:
            self._features([layer])

    def _solutions(self, members: Sequence[Predictor]) -> tuple[list[Solution], Tensor] | None:
        """Solve from the features, and return the labels; None if a member needs more than them."""
        layers = [layer for layer in map(_Layer.of, members) if layer is not None]
        if len(layers) < len(members):
            return None
        cached = self._features(layers)
        solutions = [
            member.solve_features(each.features)
            for member, each in zip(members, cached, strict=True)
            if isinstance(member, Acnml) and each.features is not None
        ]
        return (solutions, cached[0].labels) if len(solutions) == len(members) else None

    def _features(self, layers: Sequence[_Layer]) -> list[_Cached]:
        """Return the features of layers, all of the same pass over the data.

        A loader may shuffle the data, so results of different passes cannot be combined.
        """
        known = [self._known(layer) for layer in layers]
        cached = [each for each in known if each is not None]
        if len(cached) == len(layers) and len({each.number for each in cached}) == 1:
            return cached
        number = len(self._cache)
        parts, labels = self.over_batches(
            "features",
            lambda x: [layer.features(x) for layer in layers],
            lambda batches: [joined_features(list(own)) for own in zip(*batches, strict=True)],
        )
        new = [_Cached(one, number, own, labels) for one, own in zip(layers, parts, strict=True)]
        self._cache.extend(new)
        return new

    def _known(self, layer: _Layer) -> _Cached | None:
        """Return the latest features of a layer, if there are any."""
        return next((each for each in reversed(self._cache) if each.layer.agrees_with(layer)), None)

    def over_batches(
        self, description: str, compute: Callable[[Inputs], Any], join: Callable[[list[Any]], T]
    ) -> tuple[T, Tensor]:
        """Compute and join the results of all batches. Errors name the batch."""
        results: list[Any] = []
        labels: list[Tensor] = []

        def use(batch: Any) -> None:
            x, own = split_labels(batch)
            result = compute(x)
            labels.append(_checked_labels(own, result))
            results.append(result if not isinstance(result, Tensor) else result.cpu())

        each_batch(self._loader, use, description, self._progress)
        return join(results), torch.cat(labels)


def _checked_labels(labels: Any, result: Any) -> Tensor:
    """Check the labels of a batch and return them on the CPU.

    The result is log-probabilities, features or None, or a list of features of several layers.
    """
    if labels is None:
        raise ValueError(NO_LABELS)
    if not isinstance(labels, Tensor):
        kind = type(labels).__name__
        raise TypeError(
            f"labels must be a tensor of integers, got {kind}: pass a tensor or an array of class "
            "indices"
        )
    if isinstance(result, list):
        result = result[0]
    if result is not None:
        is_log_probs = isinstance(result, Tensor)
        log_probs = result if is_log_probs else log_softmax(result.logits)
        if labels.shape == log_probs.shape[:1] and not labels.is_floating_point():
            require_classes(labels, log_probs)  # it names all rows
        metrics.nll(log_probs, labels)
    return labels.cpu().long()


def joined_features(parts: list[Features | None]) -> Features | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return Features.joined(found)
