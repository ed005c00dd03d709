"""NaiveCnml and NaiveCnmlMax: conditional NML by fine-tuning for every input and label."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from acnml._util.batches import Inputs, arrays_for_arrays, as_inputs, has_arrays_only
from acnml._util.structure import Layers, parameter_names
from acnml.classifier import Classifier, require_classifier
from acnml.fit.refitting import Refit, Refitted, refit_each
from acnml.predictors.base import NmlPredictor


@dataclass(frozen=True, eq=False)
class _Refitting(NmlPredictor):
    """Base class of both predictors, which differ only in the likelihood that they select."""

    classifier: Classifier
    loader: Iterable[Any]
    refit: Refit = field(default_factory=Refit)
    layers: Layers = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        names = tuple(parameter_names(self.classifier.model, self.layers))
        object.__setattr__(self, "layers", names)

    @arrays_for_arrays
    def log_lik(self, x: Inputs) -> Tensor:
        """Return log p_θ̂_y(y|x) (B, K), not normalised.

        Each call runs the fine-tuning. To get both probabilities and regret, call this method once
        and apply `log_softmax` and `logsumexp` to the result.
        """
        return torch.stack(list(self.log_lik_each(x)))

    def log_lik_each(self, x: Inputs) -> Iterator[Tensor]:
        """Yield `log_lik` (K,) of each input in turn, as soon as it is available.

        The result of an input does not depend on the others, so an interrupted run can be continued
        with the remaining inputs. Those that are trained together become available together.
        """
        own = as_inputs(x)
        settings = self.refit, self.layers, self.progress
        found = map(self._log_lik, refit_each(self.classifier, self.loader, own, *settings))
        arrays: Iterator[Any] = (each.cpu().numpy() for each in found)
        return arrays if has_arrays_only(x) else found

    @staticmethod
    @abstractmethod
    def _log_lik(refitted: Refitted) -> Tensor:
        """Select the log-likelihoods (K,) of this predictor."""


@final
class NaiveCnml(_Refitting):
    """p(y|x) ∝ p_θ̂_y(y|x), where θ̂_y is fine-tuned on the training data and (x, y).

    For B inputs and K labels this takes B · K · epochs passes over the training data. ACNML
    approximates this predictor. Use it for comparisons. If only the last layers are trained (Bibas
    et al. 2019), the layers before them run once for many pairs of input and label.

    Args:
        classifier: the trained model, e.g. `classifier.at(posterior.mean)`.
        loader: the training data, with labels. Every pass must yield the same number of examples.
            Its order should come from torch's global random state, which is the default of
            `DataLoader`. Every input is then trained on the same batches.
        refit: settings of the fine-tuning by SGD with momentum; see `Refit`.
        layers: layers, parameters or their names to train, e.g. "last"; by default the whole model.
        progress: whether to show progress bars; by default only in a terminal.

    >>> from acnml.fit import Refit
    >>> from acnml.predictors import NaiveCnml
    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> predict = NaiveCnml(acnml.Classifier(torch.nn.Linear(2, 3)), data, Refit(epochs=1))
    >>> predict(torch.zeros(4, 2)).shape
    torch.Size([4, 3])
    """

    @staticmethod
    def _log_lik(refitted: Refitted) -> Tensor:
        return refitted.last


@final
class NaiveCnmlMax(_Refitting):
    """`NaiveCnml` with the highest p_θ(y|x) over the steps of the last epoch, for every label.

    This reduces the noise of SGD, but is biased towards high likelihoods. Arguments and cost are
    those of `NaiveCnml`.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> acnml.predictors.NaiveCnmlMax(acnml.Classifier(torch.nn.Identity()), data).refit.epochs
    5
    """

    @staticmethod
    def _log_lik(refitted: Refitted) -> Tensor:
        return refitted.best
