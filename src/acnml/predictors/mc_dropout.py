"""McDropout: the average prediction with dropout left on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from acnml._util import batches
from acnml._util.batches import Inputs
from acnml._util.seeding import seeded
from acnml._util.structure import Hook
from acnml.classifier import Classifier, require_classifier
from acnml.predictors.base import Predictor
from acnml.predictors.ensemble import log_mean
from acnml.predictors.map import finite_log_probs


@final
@dataclass(frozen=True, eq=False)
class McDropout(Predictor):
    """(1/n) Σ_i p_θ(y|x, mᵢ) over random dropout masks mᵢ (Gal & Ghahramani 2016).

    Only `nn.Dropout` and its kin (1d to 3d, Alpha, FeatureAlpha) are on; batch norm and all else
    stay in eval mode. Dropout inside a function (`functional.dropout`, the attention weights of
    `nn.MultiheadAttention`, between the layers of `nn.LSTM`) is no layer of its own and stays off.

    The same batch with the same seed gives the same numbers, on the same device. But every position
    of a batch has masks of its own: an input moved to another position, or put into a batch of
    another size, gets another draw of the same average.

    Args:
        classifier: the model, with at least one dropout layer.
        samples: n forward passes.
        seed: of the masks.
    """

    classifier: Classifier
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if not _dropout_layers(self.classifier):
            raise ValueError(
                f"{type(self.classifier.model).__name__} has no dropout layers to leave on; "
                "functional.dropout cannot be found from outside, nn.Dropout can"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the log of the averaged probabilities."""
        prepared = self.classifier.prepare(x)
        hooks = {name: _drop(layer) for name, layer in _dropout_layers(self.classifier).items()}
        dropping = self.classifier.hooked(hooks)
        with seeded(self.seed):
            averages = [self._average(dropping, chunk) for chunk in batches.chunks(prepared)]
        return torch.cat(averages)

    def _average(self, dropping: Classifier, x: Inputs) -> Tensor:
        return log_mean([finite_log_probs(dropping, x) for _ in range(self.samples)])


def _dropout_layers(classifier: Classifier) -> Mapping[str, _DropoutNd]:
    modules = classifier.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, _DropoutNd)}


def _drop(layer: _DropoutNd) -> Hook:
    """Return a hook that replaces what the layer does in eval mode by what it does in training."""
    active = copy.deepcopy(layer).train()
    active.inplace = False  # the input may be the user's own, or that of the next sample

    def hook(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
        return active(*args)

    return hook
