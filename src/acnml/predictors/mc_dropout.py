"""McDropout: the average prediction over random dropout masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from acnml._engine.trust import check
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays, in_chunks
from acnml.classifier import Classifier, Hook, require_classifier
from acnml.predictors.base import Predictor
from acnml.predictors.ensemble import log_mean
from acnml.predictors.map import finite_log_probs


class _Kind(NamedTuple):
    """What a layer does to the entries that it drops."""

    whole_channels: bool = False
    unbatched: int = 0  # inputs with so many dimensions have no batch dimension
    to_saturation: bool = False  # not to 0, but to where SELU saturates


# By the layers' forward methods, which subclasses share unless they do something else.
KINDS = {
    nn.Dropout.forward: _Kind(),
    nn.Dropout1d.forward: _Kind(whole_channels=True, unbatched=2),
    nn.Dropout2d.forward: _Kind(whole_channels=True),
    nn.Dropout3d.forward: _Kind(whole_channels=True, unbatched=4),
    nn.AlphaDropout.forward: _Kind(to_saturation=True),
    nn.FeatureAlphaDropout.forward: _Kind(whole_channels=True, to_saturation=True),
}

SATURATION = 1.7580993408473766  # λα of SELU


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
    its position in the batch and with the size of the batch. Masks come from a generator of their
    own: torch's global random state is neither used nor changed.

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
            check(self.classifier, prepared)
        masks = _Masks(self.seed)
        layers = _dropout_layers(self.classifier)
        dropping = self.classifier.hooked({name: masks.hook(one) for name, one in layers.items()})
        average, within = partial(self._average, dropping), self.classifier.threads_for
        return torch.cat([*in_chunks(prepared, average, within=within)])

    def _average(self, dropping: Classifier, x: Inputs) -> Tensor:
        return log_mean([finite_log_probs(dropping, x) for _ in range(self.samples)])


def _dropout_layers(classifier: Classifier) -> Mapping[str, _DropoutNd]:
    modules = classifier.model.named_modules()
    return {n: m for n, m in modules if isinstance(m, _DropoutNd) and type(m).forward in KINDS}


@final
class _Masks:
    """Draws masks from one generator per device."""

    def __init__(self, seed: int) -> None:
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def hook(self, layer: _DropoutNd) -> Hook:
        """Return a hook that replaces the layer's output in eval mode by that in training mode."""
        kind, rate = KINDS[type(layer).forward], layer.p

        def dropped(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
            x: Tensor = args[0]
            if rate in (0, 1) and not kind.to_saturation:
                return x.clone() if rate == 0 else torch.zeros_like(x)
            kept = self._kept(x, kind, 1 - rate)
            if not kind.to_saturation:
                return x * kept.div_(1 - rate)
            scale = 1 / math.sqrt((SATURATION**2 * rate + 1) * (1 - rate)) if rate < 1 else 0.0
            return x * kept * scale + (kept - 1 + rate) * SATURATION * scale

        return dropped

    def _kept(self, x: Tensor, kind: _Kind, share: float) -> Tensor:
        """Draw 1 for what is kept and 0 for what is dropped, to be multiplied with x."""
        if x.device not in self._generators:
            self._generators[x.device] = generator = torch.Generator(x.device)
            generator.manual_seed(self._seed)
        shape = list(x.shape)
        if kind.whole_channels:
            first = 1 if x.ndim == kind.unbatched else 2
            shape[first:] = [1] * len(shape[first:])
        return x.new_empty(shape).bernoulli_(share, generator=self._generators[x.device])
