"""Places of a network at which features are taken, and the features of a batch at all of them.

Without the user naming layers, `find_places` runs one batch with hooks on all modules and takes

- for every number of positions, such as 32×32, 16×16 and 8×8, the last tensor with so many of them:
  the stages of a convolutional network, or the last hidden states of a transformer,
- the input of every Linear layer that receives one vector per input and stands behind another layer
  with parameters: the hidden layers of an MLP and the features of the last layer.

A tensor with positions is pooled: the mean and the standard deviation of every channel over all
positions. The features of an input are all of this in one vector.

If a batch has an `attention_mask`, only vectors are taken. Some positions are padding then, and
pooled over them, the features of a text would depend on the other texts of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier, Hook

# Layers that show which dimension of their outputs, and of those after them, counts channels.
CHANNELS_SECOND = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag)


@final
@dataclass(frozen=True)
class Place:
    """Where features are taken: what a module receives or returns.

    Args:
        module: its name in the model, "" for the model itself.
        is_input: whether to take the first argument of the module instead of its output.
        channels: the dimension that counts channels, where there are positions to pool over.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> classifier = acnml.Classifier(model)
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> hidden = acnml.Place("1")  # the output of the second module, Tanh
    >>> acnml.fit_typicality(classifier, x[:200], x[200:], places=[hidden])(x[:5]).shape
    torch.Size([5])
    """

    module: str
    is_input: bool = False
    channels: int = 1

    def __str__(self) -> str:
        return f"{'input' if self.is_input else 'output'} of {self.module or 'the model'!r}"


def pooled(tensor: Tensor, channels: int = 1) -> Tensor:
    """Return vectors (B, d) as they are; else mean and deviation over positions (B, 2 C)."""
    if tensor.ndim == 2:
        return tensor
    flat = tensor.movedim(channels, 1).flatten(2)
    mean = flat.mean(-1, keepdim=True)
    deviation = (flat - mean).square().mean(-1).sqrt()
    return torch.cat([mean.squeeze(-1), deviation], dim=1)


@final
class Taps:
    """A view of a classifier that keeps the pooled features of its last run.

    Run `classifier` in any way, then call `features` once.
    """

    def __init__(self, classifier: Classifier, places: Sequence[Place]) -> None:
        self.places, self._kept, self._size = tuple(places), dict[Place, Tensor](), 0
        by_module: dict[str, list[Place]] = {}
        for place in self.places:
            by_module.setdefault(place.module, []).append(place)
        hooks = {name: self._keeping(own) for name, own in by_module.items()}
        self.classifier = classifier.hooked(hooks).hooked({"": self._count})

    def _keeping(self, places: list[Place]) -> Hook:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            for place in places:  # pooled at once: a later module may write to the tensor
                self._kept[place] = pooled_at(place, args, output)
            return output

        return hook

    def _count(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Keep the number of inputs; a hook on the model itself."""
        self._size = len(args[0])
        return output

    def features(self) -> Tensor:
        """Return the features (B, d) of the last run, all places in one vector, and forget them.

        A run that takes another way through the model would otherwise return the features of the
        run before it.
        """
        kept, self._kept = self._kept, {}
        for place in self.places:
            if place not in kept:
                raise ValueError(f"the model did not run {place}: take features at other places")
            if len(kept[place]) != self._size:
                raise ValueError(
                    f"the {place} has {len(kept[place])} rows for a batch of {self._size} inputs: "
                    "its first dimension must be the batch; take features at other places"
                )
        return torch.cat([kept[place] for place in self.places], dim=1)


def pooled_at(place: Place, args: tuple[Any, ...], output: Any) -> Tensor:
    """Return what a module received or returned at a place, pooled and detached."""
    tensor = args[0] if place.is_input else output
    if not _is_feature(tensor):
        raise ValueError(f"the {place} is not a floating point tensor of features; name another")
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return pooled(tensor.detach().to(wide), place.channels)


@torch.inference_mode(False)
@torch.no_grad()
def find_places(classifier: Classifier, x: Inputs) -> tuple[Place, ...]:
    """Return the default places of a model, in the order in which they are reached.

    Args:
        classifier: the model.
        x: a prepared batch, which is run once.
    """
    search = _Search(batches.size(x))
    hooks = {name: search.hook(name) for name, _ in classifier.model.named_modules()}
    logits = classifier.hooked(hooks).logits(x)
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    is_padded = isinstance(x, Mapping) and "attention_mask" in x
    return search.places(with_positions=not is_padded)


@final
class _Search:
    """What all modules receive and return in one run, in the order in which they finish."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._channels: int | None = None  # of the last layer that shows it
        self._seen_parameters = False
        self._by_positions: dict[int, tuple[int, Place]] = {}
        self._vectors: dict[str, tuple[int, Place]] = {}
        self._first_linear: tuple[int, Place] | None = None
        self._finished = 0

    def hook(self, name: str) -> Hook:
        def run(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            self._finished += 1
            if isinstance(module, CHANNELS_SECOND + CHANNELS_LAST):
                self._channels = -1 if isinstance(module, CHANNELS_LAST) else 1
            if isinstance(module, nn.Linear) and self._is_vector(args[0]):
                found = (self._finished, Place(name, is_input=True))
                if self._seen_parameters:
                    self._vectors[name] = found
                else:
                    self._first_linear = found
            self._seen_parameters |= next(module.parameters(recurse=False), None) is not None
            if _is_feature(output) and output.ndim > 2 and len(output) == self._batch:
                self._keep_positions(name, output)
            return output

        return run

    def _keep_positions(self, name: str, output: Tensor) -> None:
        default = -1 if output.ndim == 3 else 1
        channels = default if self._channels is None else self._channels
        positions = math.prod(output.shape[1:]) // output.shape[channels]
        if positions > 1 and self._seen_parameters:
            self._by_positions[positions] = (self._finished, Place(name, channels=channels))

    def _is_vector(self, tensor: Any) -> bool:
        return _is_feature(tensor) and tensor.ndim == 2 and len(tensor) == self._batch

    def places(self, with_positions: bool) -> tuple[Place, ...]:
        stages = self._by_positions.values() if with_positions else ()
        found = [*stages, *self._vectors.values()]
        if not found and self._first_linear is not None:
            found = [self._first_linear]
        if not found and not with_positions:
            raise ValueError(
                "no Linear layer receives a vector per input, and positions are not pooled, as "
                "some are padding; pass acnml.transformers.LastToken(model) for a decoder with a "
                "head `score`, or name the places by `places`"
            )
        if not found:
            raise ValueError(
                "no module of the model returns a tensor with positions, and no Linear layer "
                "receives a vector per input; name the places by `places`"
            )
        return tuple(place for _, place in sorted(found, key=lambda item: item[0]))


def _is_feature(value: Any) -> bool:
    """Whether a value is a tensor of features; nested ones, without a common length, are not."""
    is_dense = isinstance(value, Tensor) and not value.is_nested
    return is_dense and value.is_floating_point() and value.ndim >= 2
