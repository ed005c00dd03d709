"""Predictions for validation data, with as few passes over the data as possible.

Predictors that differ only in α, or in the posterior of the last layer, need the inputs and outputs
of that layer. Predictors that differ only in α need the logits and their covariance, whatever
layers the posterior covers. Both are computed in one pass and kept, so a search over any number of
values takes one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from acnml._util.batches import NO_LABELS, Inputs, as_loader, each_batch, split_labels
from acnml.classifier import log_softmax
from acnml.fit.batches import checked_labels, require_classes
from acnml.predictors.acnml import Acnml
from acnml.predictors.base import Predictor
from acnml.predictors.ensemble import Ensemble, log_mean
from acnml.predictors.map import Map
from acnml.predictors.modes import Modes
from acnml.problem import Features, Problem
from acnml.solution import Solution

T = TypeVar("T")

# Numbers in the covariances of the logits that are kept from one α to the next.
MOST_KEPT = 2**25


class _Known(NamedTuple):
    """What a pass over the data gave for a predictor."""

    predictor: Acnml
    number: int  # of the pass
    found: Features | Problem | None  # None if the predictor needs the inputs for every value
    labels: Tensor

    def serves(self, other: Acnml) -> bool:
        """Whether another predictor needs the same of the data."""
        mine = self.predictor
        if not isinstance(self.found, Features):
            same = other.posterior is mine.posterior
            return same and other.classifier.agrees_with(mine.classifier)
        known, its = mine.last_layer, other.last_layer
        same = known is not None and its is not None and known.name == its.name
        return same and other.at_mean.agrees_with(mine.at_mean)


@final
class HeldOut:
    """A labelled validation set, with what earlier passes over it gave.

    Args:
        loader: validation data, with labels.
        progress: whether to show progress bars; by default only in a terminal.
    """

    def __init__(self, loader: Iterable[Any], progress: bool | None = None) -> None:
        self._loader, self._progress = as_loader(loader), progress
        self._passes: list[_Known] = []

    def predictions(self, predictor: Predictor, description: str) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (N, K) and labels (N,) of all data, on the CPU."""
        if isinstance(predictor, Map):
            for known in self._passes:
                at_mean = known.predictor.at_mean
                if known.found is not None and at_mean.agrees_with(predictor.classifier):
                    return log_softmax(known.found.logits).cpu(), known.labels
        members = predictor.predictors if isinstance(predictor, (Ensemble, Modes)) else (predictor,)
        found = self._solutions(members)
        if found is None:
            return self._over_batches(description, lambda x: predictor(x), torch.cat)
        solutions, labels = found
        if isinstance(predictor, Modes):
            log_lik = predictor.combined([one.log_lik.cpu() for one in solutions])
            return torch.log_softmax(log_lik, dim=-1), labels
        return log_mean([one.log_probs.cpu() for one in solutions]), labels

    def _solutions(self, members: Sequence[Predictor]) -> tuple[list[Solution], Tensor] | None:
        """Solve from what is known of the data; return None if a member needs the data."""
        own = [one for one in members if isinstance(one, Acnml) and one.logit_solver]
        if len(own) < len(members):
            return None
        known = self._known(own)
        solutions = []
        for member, each in zip(own, known, strict=True):
            if isinstance(each.found, Features):
                solutions.append(member.solve_features(each.found))
            elif each.found is not None:
                solutions.append(member.solve_problem(each.found))
        return (solutions, known[0].labels) if len(solutions) == len(own) else None

    def _known(self, members: Sequence[Acnml]) -> list[_Known]:
        """Return what members need of the data, all of the same pass.

        A loader may shuffle the data, so results of different passes cannot be combined.
        """
        latest = self._passes[::-1]
        known = [next((each for each in latest if each.serves(one)), None) for one in members]
        old = [each for each in known if each is not None]
        if len(old) == len(members) and len({each.number for each in old}) == 1:
            return old
        number, left = len(self._passes), MOST_KEPT

        def look(x: Inputs) -> list[Features | Problem | None]:
            return [look_with(member, x) for member in members]

        def look_with(member: Acnml, x: Inputs) -> Features | Problem | None:
            nonlocal left
            features = member.features(x)
            if features is not None or left < 0:
                return features
            problem = member.problem(x)
            left -= problem.logits.shape[1] * problem.logits.numel()
            return problem

        parts, labels = self._over_batches(
            "features", look, lambda batches: [_joined(own) for own in zip(*batches, strict=True)]
        )
        new = [_Known(one, number, own, labels) for one, own in zip(members, parts, strict=True)]
        self._passes.extend(new)
        return new

    def _over_batches(
        self, description: str, compute: Callable[[Inputs], Any], join: Callable[[list[Any]], T]
    ) -> tuple[T, Tensor]:
        """Compute and join the results of all batches. Errors name the batch."""
        results: list[Any] = []
        labels: list[Tensor] = []

        def use(batch: Any) -> None:
            x, given = split_labels(batch)
            if given is None:
                raise ValueError(NO_LABELS)
            own, result = checked_labels(given, x), compute(x)
            first = result[0] if isinstance(result, list) else result
            if first is not None:
                require_classes(own, first if isinstance(first, Tensor) else first.logits)
            labels.append(own.cpu())
            results.append(result.cpu() if isinstance(result, Tensor) else result)

        each_batch(self._loader, use, description, self._progress)
        return join(results), torch.cat(labels)


def _joined(parts: Sequence[Features | Problem | None]) -> Features | Problem | None:
    """Return what all batches gave as one, or None if a batch gave nothing."""
    features = [part for part in parts if isinstance(part, Features)]
    found = [part for part in parts if isinstance(part, Problem)]
    if len(features) == len(parts):
        return Features.joined(features)
    return Problem.joined(found) if len(found) == len(parts) else None
