"""NaiveCnml and NaiveCnmlMax: conditional NML by training again for every input and label."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from acnml._util.batches import Inputs
from acnml._util.params import count
from acnml._util.selection import Parameters, parameter_names
from acnml.classifier import Classifier, require_classifier
from acnml.fitting.refitting import Refit, Refitted, refit_each
from acnml.predictors.base import Predictor


@dataclass(frozen=True, eq=False, repr=False)
class _Refitting(Predictor):
    """What the two predictors share: all but which of the refitted likelihoods counts."""

    classifier: Classifier
    loader: Iterable[Any]
    refit: Refit = field(default_factory=Refit)
    parameters: Parameters = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        names = tuple(parameter_names(self.classifier.model, self.parameters))
        object.__setattr__(self, "parameters", names)

    def __call__(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return torch.log_softmax(self.log_lik(x), dim=-1)

    def regret(self, x: Inputs) -> Tensor:
        """Return log C(x) (B,): higher is more out of distribution."""
        return torch.logsumexp(self.log_lik(x), dim=-1)

    def log_lik(self, x: Inputs) -> Tensor:
        """Return log p_θ̂_y(y|x) (B, K), not normalised: what both of the above train for."""
        return torch.stack(list(self.log_lik_each(x)))

    def log_lik_each(self, x: Inputs) -> Iterator[Tensor]:
        """Yield `log_lik` (K,) of one input after the other, as they are found.

        An input's result does not depend on the others, so a long run can be taken up again where
        it ended, with those inputs that have no result yet. Inputs that train together are found
        together: with less memory (`Refit`) or fewer inputs in x, less is lost when a run ends.
        """
        refits = refit_each(
            self.classifier, self.loader, x, self.refit, self.parameters, self.progress
        )
        return map(self._log_lik, refits)

    @staticmethod
    @abstractmethod
    def _log_lik(refitted: Refitted) -> Tensor:
        """Return the log-likelihoods (K,) that count."""

    def __repr__(self) -> str:
        names = parameter_names(self.classifier.model, self.parameters)
        size = count(self.classifier.copy_parameters(names))
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        trained = f"{size:,} parameters: {span}"
        return f"{type(self).__name__}({self.classifier!r}, {self.refit!r}, {trained})"


@final
class NaiveCnml(_Refitting):
    """p(y|x) ∝ p_θ̂_y(y|x) with θ̂_y trained on all data and on (x, y), from the model's weights.

    Costs, for B inputs and K labels, B · K · epochs passes over the training data: B = 10 inputs
    with K = 10 labels train 100 times. It is what ACNML approximates, for comparisons and for
    choosing α (`tuning.alpha_matching_cnml`). Where only last layers train (Bibas et al. 2019), the
    layers before them run once for all rows, and many more rows fit into memory.

    Args:
        classifier: the trained model, e.g. `classifier.at(posterior.mean)`.
        loader: the training data, with labels, as many in every pass. Its order should come from
            torch's global random state, as that of a `DataLoader` does by default: then every
            input sees the same batches.
        refit: how to train; SGD with momentum, see `Refit`.
        parameters: parameters, their names or submodules that learn, e.g. `[last_linear(model)]`;
            all of the model's by default.
        progress: show progress bars; by default in a terminal only.

    >>> from acnml import Classifier, NaiveCnml, Refit
    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> predict = NaiveCnml(Classifier(torch.nn.Linear(2, 3)), data, Refit(epochs=1))
    >>> predict(torch.zeros(4, 2)).shape
    torch.Size([4, 3])
    """

    @staticmethod
    def _log_lik(refitted: Refitted) -> Tensor:
        return refitted.last


@final
class NaiveCnmlMax(_Refitting):
    """`NaiveCnml` with the highest p_θ(y|x) after any step of the last epoch, for every label.

    Evens out the noise of SGD, and leans to high likelihoods; arguments and cost are the same.
    """

    @staticmethod
    def _log_lik(refitted: Refitted) -> Tensor:
        return refitted.best
