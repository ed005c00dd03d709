"""McDropout: the average prediction over random dropout masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

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

# By the layers' forward methods, which subclasses share unless they do something else: how many
# dimensions an input has without its batch. Then whole channels are dropped, except by `Dropout`.
UNBATCHED = {
    nn.Dropout.forward: 0,
    nn.Dropout1d.forward: 2,
    nn.Dropout2d.forward: 0,
    nn.Dropout3d.forward: 4,
}


@final
@dataclass(frozen=True, eq=False)
class McDropout(Predictor):
    """(1/n) Σ_i p_θ(y|x, mᵢ) over random dropout masks mᵢ (Gal & Ghahramani 2016).

    Only layers that drop entries or channels (`nn.Dropout`, `Dropout1d` to `Dropout3d`) run in
    training mode; all others run in eval mode. Other kinds, as `nn.AlphaDropout`, are refused.
    Dropout that is not a separate layer is off: `functional.dropout`, the attention weights of
    `nn.MultiheadAttention`, and dropout between the layers of `nn.LSTM`.

    The same batch with the same seed gives the same result on the same device. Masks differ between
    the positions of a batch, so the result for an input varies slightly with them. They come from a
    generator of their own: torch's global random state is neither used nor changed.

    Args:
        classifier: the model, with at least one dropout layer.
        samples: the number n of forward passes.
        seed: random seed of the masks.

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
        prepared, within = self.classifier.prepare(x), self.classifier.threads_for
        if self.classifier.findings.is_due((), prepared):
            check(self.classifier, prepared)
        masks = torch.Generator(self.classifier.device).manual_seed(self.seed)
        layers = _dropout_layers(self.classifier)
        dropping = self.classifier.hooked({n: _dropping(one, masks) for n, one in layers.items()})

        def average(chunk: Inputs) -> Tensor:
            return log_mean([finite_log_probs(dropping, chunk) for _ in range(self.samples)])

        return torch.cat([*in_chunks(prepared, average, within=within)])


def _dropout_layers(classifier: Classifier) -> Mapping[str, _DropoutNd]:
    found = {n: m for n, m in classifier.model.named_modules() if isinstance(m, _DropoutNd)}
    for name, layer in found.items():
        if type(layer).forward not in UNBATCHED:
            kind = type(layer).__name__
            raise ValueError(f"McDropout draws no masks for the {kind} {name!r}: use nn.Dropout")
    return found


def _dropping(layer: _DropoutNd, masks: torch.Generator) -> Hook:
    """Return a hook that replaces a layer's output in eval mode by that in training mode."""
    method, share = type(layer).forward, 1 - layer.p

    def dropped(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
        x: Tensor = args[0]
        if share in (0, 1):
            return x * share
        shape = list(x.shape)
        if method is not nn.Dropout.forward:
            first = 1 if x.ndim == UNBATCHED[method] else 2
            shape[first:] = [1] * len(shape[first:])
        return x * x.new_empty(shape).bernoulli_(share, generator=masks).div_(share)

    return dropped
