"""Bma: Bayesian model averaging over posterior samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from acnml._engine.trust import check
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays, in_chunks
from acnml._util.messages import track
from acnml._util.params import Params
from acnml.classifier import Classifier
from acnml.fit.batch_norm import batch_norm_statistics
from acnml.posteriors.base import Posterior
from acnml.predictors.base import Predictor, matched
from acnml.predictors.ensemble import log_mean
from acnml.predictors.map import finite_log_probs


@final
@dataclass(frozen=True, eq=False)
class Bma(Predictor):
    """Bayesian model averaging: (1/n) Σ_i p_θᵢ(y|x) with θᵢ ~ q.

    The samples are drawn once, when the predictor is constructed. They take the memory of n copies
    of the parameters that the posterior covers.

    Args:
        classifier: the model.
        posterior: the posterior q.
        samples: the number n of samples; the ACNML paper uses 30.
        seed: random seed of the samples.
        statistics: batch-norm statistics of every sample; see `refreshed`.

    >>> acnml.Bma(classifier, posterior, samples=10)(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    classifier: Classifier
    posterior: Posterior
    samples: int = 30
    seed: int = 0
    statistics: tuple[Params, ...] = ()
    _points: tuple[Params, ...] = field(init=False, repr=False)
    # Whether the logits were found to depend on the posterior's parameters.
    _is_used: bool = field(default=False, init=False, repr=False)

    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        checks.settle_integers(self, samples=1, seed=None)
        object.__setattr__(self, "posterior", matched(self.posterior, self.classifier))
        if self.statistics and len(self.statistics) != self.samples:
            raise ValueError(
                f"got {len(self.statistics)} statistics for {self.samples} samples: "
                "pass one for each sample, or none"
            )
        generator = torch.Generator().manual_seed(self.seed)
        points = []
        for statistics in self.statistics or ({},) * self.samples:
            draw = self.posterior.sample(1, generator)
            view = self.classifier.at({**{n: t[0] for n, t in draw.items()}, **statistics})
            points.append({n: view.overrides[n] for n in (*draw, *statistics)})
        object.__setattr__(self, "_points", tuple(points))

    def refreshed(self, loader: Iterable[Any], progress: bool | None = None) -> Bma:
        """Return the same predictor with batch-norm statistics recomputed for every sample.

        This is necessary if the samples are far from the weights for which the running statistics
        were collected (Maddox et al. 2019). It takes one pass over the loader per sample.
        """
        points = track(self._points, "batch norm", progress)
        statistics = (batch_norm_statistics(self.classifier, loader, point) for point in points)
        return replace(self, statistics=tuple(statistics))

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the log of the averaged probabilities."""
        prepared = self.classifier.prepare(x)
        if self.classifier.findings.is_due((), prepared):
            check(self.classifier, prepared)
        within = self.classifier.threads_for
        averages = torch.cat([*in_chunks(prepared, self._average, within=within)])
        if not self._is_used:
            self.classifier.require_used(prepared, self.posterior.mean)
            object.__setattr__(self, "_is_used", True)
        return averages

    def _average(self, x: Inputs) -> Tensor:
        return log_mean([finite_log_probs(self.classifier, x, point) for point in self._points])
