"""McDropout: the average prediction over random dropout masks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from acnml._engine.trust import require_apart
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml._util.passes import in_chunks
from acnml._util.seeding import seeded
from acnml.classifier import Classifier, Hook, require_classifier
from acnml.predictors.base import Predictor
from acnml.predictors.ensemble import log_mean
from acnml.predictors.map import finite_log_probs


@final
@dataclass(frozen=True, eq=False)
class McDropout(Predictor):
    """(1/n) Σ_i p_θ(y|x, mᵢ) over random dropout masks mᵢ (Gal & Ghahramani 2016).

    Only the dropout layers of torch (`nn.Dropout`, `Dropout1d` to `Dropout3d`, `AlphaDropout` and
    `FeatureAlphaDropout`) run in training mode. All other layers run in eval mode. Dropout that is
    not a separate layer is off: `functional.dropout`, the attention weights of
    `nn.MultiheadAttention`, and dropout between the layers of `nn.LSTM`.

    The same batch with the same seed gives the same result on the same device. However, masks
    differ between the positions of a batch. The result for an input therefore varies slightly with
    its position in the batch and with the size of the batch.

    Args:
        classifier: the model, with at least one dropout layer.
        samples: the number n of forward passes.
        seed: random seed of the masks.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 3))
    >>> acnml.McDropout(acnml.Classifier(model), samples=10)(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """

    classifier: Classifier
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        checks.settle_integers(self, samples=1, seed=None)
        if not _dropout_layers(self.classifier):
            raise ValueError(
                f"{type(self.classifier.model).__name__} has no dropout layers; "
                "use nn.Dropout in the model, because functional.dropout cannot be switched on"
            )

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the log of the averaged probabilities."""
        prepared = self.classifier.prepare(x)
        if self.classifier.findings.is_due((), prepared):
            require_apart(self.classifier, prepared)
        hooks = {name: _drop(layer) for name, layer in _dropout_layers(self.classifier).items()}
        dropping = self.classifier.hooked(hooks)
        with seeded(self.seed):
            return torch.cat([*in_chunks(prepared, partial(self._average, dropping))])

    def _average(self, dropping: Classifier, x: Inputs) -> Tensor:
        return log_mean([finite_log_probs(dropping, x) for _ in range(self.samples)])


def _dropout_layers(classifier: Classifier) -> Mapping[str, _DropoutNd]:
    modules = classifier.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, _DropoutNd)}


def _drop(layer: _DropoutNd) -> Hook:
    """Return a hook that replaces the layer's output in eval mode by that in training mode."""
    active = copy.deepcopy(layer).train()
    active.inplace = False  # the input may be the user's tensor, or may be needed again

    def hook(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
        return active(*args)

    return hook
