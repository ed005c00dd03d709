"""Validation: predictions for a validation set, with as few passes over it as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from acnml import metrics
from acnml._engine.layers import Site
from acnml._util.batches import NO_LABELS, Inputs, as_loader, chunks, split_labels
from acnml._util.passes import each_batch
from acnml.classifier import Classifier
from acnml.head.features import Features, all_features
from acnml.predictors import Acnml, Ensemble, Map, Modes, Predictor
from acnml.predictors.ensemble import log_mean
from acnml.typicality.density import Observer

T = TypeVar("T")


class _Cached(NamedTuple):
    """The inputs and outputs of one layer of a network, for all data."""

    network: Classifier
    layer: str
    observer: Observer | None  # of other places
    features: Features | None  # None if the logits are not the outputs of the layer
    labels: Tensor


@final
class Validation:
    """A labelled validation set, with a cache of its features.

    If predictors differ only in the posterior of the last layer or in α, their predictions can be
    computed from the features, that is the inputs and outputs of that layer. The features are
    computed in one pass and cached, so a search needs only one pass for any number of values.

    Args:
        loader: validation data, with labels.
        progress: whether to show progress bars; by default only in a terminal.
    """

    def __init__(self, loader: Iterable[Any], progress: bool | None = None) -> None:
        self._loader, self._progress = as_loader(loader), progress
        self._cache: list[_Cached] = []

    def predictions(self, predictor: Predictor, description: str) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (N, K) and labels (N,) of all data, on the CPU."""
        if isinstance(predictor, Modes) and all(isinstance(m, Acnml) for m in predictor.predictors):
            log_lik, labels = self._log_lik_of_modes(predictor, description)
            return torch.log_softmax(log_lik, dim=-1), labels
        if isinstance(predictor, Ensemble):
            members = [self.predictions(member, description) for member in predictor.predictors]
            return log_mean([log_probs for log_probs, _ in members]), members[0][1]
        if isinstance(predictor, Acnml):
            cached = self.prepared(predictor)
            if cached is not None and cached.features is not None:
                log_probs = predictor.solve_features(cached.features).log_probs
                return log_probs.cpu(), cached.labels
        if isinstance(predictor, Map):
            for known in self._cache:
                if known.features is not None and known.network.agrees_with(predictor.classifier):
                    return _log_softmax(known.features.logits).cpu(), known.labels
        return self.over_batches(description, lambda x: predictor(x), torch.cat)

    def _log_lik_of_modes(self, modes: Modes, description: str) -> tuple[Tensor, Tensor]:
        """Return the log-likelihoods (N, K) and labels (N,), with one pass for every network."""
        parts = []
        for member in modes.predictors:
            assert isinstance(member, Acnml)
            cached = self.prepared(member)
            if cached is not None and cached.features is not None:
                log_lik = member.solve_features(cached.features).log_lik.cpu()
                parts.append((log_lik, cached.labels))
            else:
                parts.append(self.over_batches(description, member.log_lik, torch.cat))
        return modes.combined([log_lik for log_lik, _ in parts]), parts[0][1]

    def prepared(self, predictor: Acnml) -> _Cached | None:
        """Return the features for a predictor, or None if it adapts more than the last layer."""
        layer = predictor.last_layer
        if layer is None:
            return None
        network = predictor.classifier.at(predictor.posterior.mean)
        return self.of_layer(network, layer, predictor.typicality)

    def of_layer(
        self, network: Classifier, layer: Site, observer: Observer | None = None
    ) -> _Cached:
        """Return the features of a Linear layer, from one pass over the data or from the cache."""
        for known in self._cache:
            is_same = known.layer == layer.name and known.observer is observer
            if is_same and known.network.agrees_with(network):
                return known

        def compute(x: Inputs) -> Features | None:
            return all_features(network, layer, chunks(network.prepare(x)), observer=observer)

        features, labels = self.over_batches("features", compute, joined_features)
        self._cache.append(_Cached(network, layer.name, observer, features, labels))
        return self._cache[-1]

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


def _checked_labels(labels: Any, result: Tensor | Features | None) -> Tensor:
    """Check the labels of a batch against its predictions and return them on the CPU."""
    if labels is None:
        raise ValueError(NO_LABELS)
    if not isinstance(labels, Tensor):
        kind = type(labels).__name__
        raise TypeError(
            f"labels must be a tensor of integers, got {kind}: pass a tensor or an array of class "
            "indices"
        )
    if isinstance(result, Features):
        metrics.nll(_log_softmax(result.logits), labels)
    elif result is not None:
        metrics.nll(result, labels)
    return labels.cpu().long()


def joined_features(parts: list[Features | None]) -> Features | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return Features.joined(found)


def _log_softmax(logits: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide), dim=-1)
