"""Features of a network: what passes some of its modules while it runs, pooled to one vector.

Without the user naming modules, `find_places` runs one batch with hooks on all of them and takes

- for every number of positions, such as 32×32, 16×16 and 8×8, the last tensor with so many of them:
  the stages of a convolutional network, or the last hidden states of a vision transformer.
  Layers that only pad make no stage,
- the input of every Linear layer that receives one vector per input and stands behind another layer
  with parameters: the hidden layers of an MLP, and the features of the last layer.

A tensor with positions is pooled: the mean and the standard deviation of every channel over all
positions. Only vectors are taken from networks that read token ids or a mapping of tensors: some
positions are padding there, and features pooled over it would depend on the other texts of a batch.

The vector of every place is scaled to unit length, and its length is one more feature. Lengths vary
much among typical inputs and would hide what their directions show; without them, inputs that are
merely too large would seem typical. The model's own inputs and features at positions of maps stay
as they are: there, on clean data, the scaled ones find wrong answers less well.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from acnml._util import batches
from acnml._util.arrays import as_tensor
from acnml._util.batches import Inputs
from acnml.classifier import Classifier, Hook

# Features beyond this number are folded: a covariance costs its square.
MOST_FEATURES = 4096

# Inputs with which places are looked for, and on whose scale features are folded. The number is
# odd, so that a tensor that begins with positions is hardly taken for one that begins with the
# batch.
PROBED = 13

# Layers that show which dimension of their outputs, and of those after them, counts channels.
CHANNELS_SECOND = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag)

# Where torch has modules that add positions, but no features.
PADDING = "torch.nn.modules.padding"

# Names of heads beside the main one, which may run after it.
AUXILIARY = re.compile(r"aux", re.IGNORECASE)

# Modules inside attention return heads and weights, not hidden states.
INSIDE_ATTENTION = re.compile(r"att(entio)?n.*\.", re.IGNORECASE)


@final
@dataclass(frozen=True)
class Place:
    """Where features are taken: what a module receives or returns.

    Args:
        module: its name in the model, "" for the model itself.
        is_input: whether to take the first argument of the module instead of its output.
        channels: the dimension that counts channels, where there are positions to pool over.
        is_pooled: whether to pool over positions; maps and tokens have features at each.
        is_scaled: whether to scale vectors to unit length, and to add their lengths. Features at
            positions are never scaled.
    """

    module: str
    is_input: bool = False
    channels: int = 1
    is_pooled: bool = True
    is_scaled: bool = True

    def __str__(self) -> str:
        return f"{'input' if self.is_input else 'output'} of {self.module or 'the model'!r}"

    def pooled(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """Return what a module received or returned here; pooled, one vector per input."""
        tensor = args[0] if self.is_input else output
        if not _is_feature(tensor):
            raise ValueError(f"the {self} is not a floating point tensor of features; name another")
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        if tensor.ndim == 2 or not self.is_pooled:
            return tensor
        flat = tensor.movedim(self.channels, 1).flatten(2)
        mean = flat.mean(-1, keepdim=True)
        deviation = torch.linalg.vector_norm(flat - mean, dim=-1) / math.sqrt(flat.shape[-1])
        return torch.cat([mean.squeeze(-1), deviation], dim=1)


def direction_and_length(vectors: Any) -> Any:
    """Return vectors (..., d) at unit length, and their lengths as one more number (..., d + 1).

    Vectors are a tensor or an array, and so is the result.

    Use it for features of your own, such as embeddings, before they go to a `Calibrator`.

    >>> direction_and_length(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000, 5.0000]])
    """
    if batches.has_arrays_only(vectors):
        return direction_and_length(as_tensor(vectors, "vectors")).numpy()
    return torch.cat(_scaled(vectors), dim=-1)


def _scaled(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (..., d) at unit length, and their lengths (..., 1)."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length.clamp(min=torch.finfo(vectors.dtype).tiny), length


@final
@dataclass(frozen=True, eq=False)
class Folding:
    """Turns p features into `MOST_FEATURES`: adds up those that are so far apart, at random signs.

    A sparse random projection, which keeps inner products in expectation (Weinberger et al. 2009).
    """

    factors: Tensor  # (p,) ±1 / deviation

    @staticmethod
    def of(features: Tensor) -> Folding | None:
        """Return a folding on the scale of some features (B, p); None if there are not too many."""
        if features.shape[1] <= MOST_FEATURES:
            return None
        deviation = features.std(0, correction=0)
        scale = torch.where(deviation > 0, deviation, 1.0)
        generator = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(2, scale.shape, generator=generator) - 1
        return Folding(signs.to(scale) / scale)

    def __call__(self, features: Tensor) -> Tensor:
        """Return folded features (B, `MOST_FEATURES`)."""
        scaled = features * self.factors.to(features.device)
        padded = functional.pad(scaled, (0, -scaled.shape[-1] % MOST_FEATURES))
        return padded.unflatten(-1, (-1, MOST_FEATURES)).sum(-2)


@final
class Keeper:
    """Pools what passes some modules, and keeps the features of a run, for each thread its own."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places, self.run = tuple(places), threading.local()
        self.run.features = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        return Keeper(self.places)

    def __reduce__(self) -> tuple[type[Keeper], tuple[tuple[Place, ...]]]:
        return Keeper, (self.places,)

    def hooks(self) -> dict[str, Hook]:
        """Return a forward hook for every module that has places."""
        return {place.module: partial(self, place.module) for place in self.places}

    def __call__(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Pool what passes a module, at once, as a later one may write to it; change nothing."""
        for place in self.places:
            if place.module == name:
                self.run.features[place] = place.pooled(args, output)
        return output

    def joined(self, size: int, folding: Folding | None) -> Tensor:
        """Return the features of all places in one vector per input (B, d), and keep none."""
        kept, self.run.features = self.run.features, {}
        for place in self.places:
            if place not in kept:
                raise ValueError(f"the model did not run {place}: take features at other places")
            if kept[place].shape[0] != size:
                raise ValueError(
                    f"the {place} has {len(kept[place])} rows for a batch of {size} inputs: its "
                    "first dimension must be the batch; take features at other places"
                )
        # Features at positions are those of one place, in whichever layout it has.
        parts: list[Tensor] = []
        for place in self.places:
            is_scaled = place.is_scaled and place.is_pooled
            parts += _scaled(kept[place]) if is_scaled else [kept[place]]
        features = torch.cat(parts, dim=1)
        return features if folding is None else folding(features)


@final
class Taps:
    """Runs a classifier and returns pooled features beside its logits."""

    def __init__(
        self, classifier: Classifier, places: Sequence[Place], folding: Folding | None = None
    ) -> None:
        self.places, self.folding, self._keeper = tuple(places), folding, Keeper(places)
        self._classifier = classifier.hooked(self._keeper.hooks())

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return the logits of prepared inputs, and their features (B, d)."""
        # A run may take another way through the model than the one before it.
        self._keeper.run.features = {}
        logits = self._classifier.logits(x).detach()
        return logits, self._keeper.joined(len(logits), self.folding)


class _Passed(NamedTuple):
    """What a module received and returned: the shapes of features, None for anything else."""

    name: str
    module: nn.Module
    received: torch.Size | None
    returned: torch.Size | None


@torch.inference_mode(False)
@torch.no_grad()
def find_places(classifier: Classifier, x: Inputs) -> tuple[Place, ...]:
    """Return the default places of a model, in the order in which they are reached.

    Args:
        classifier: the model.
        x: a prepared batch, which is run once.
    """
    passed: list[_Passed] = []  # in the order in which modules finish
    size = batches.size(x)

    def shape(value: Any) -> torch.Size | None:
        return value.shape if _is_feature(value) and len(value) == size else None

    def noting(name: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            passed.append(_Passed(name, module, shape(args[0] if args else None), shape(output)))
            return output

        return hook

    hooks = {name: noting(name) for name, _ in classifier.model.named_modules()}
    classifier.hooked(hooks).logits(x)
    reads_positions = isinstance(x, Tensor) and x.is_floating_point()
    return _default_places(passed, reads_positions)


def _default_places(passed: Sequence[_Passed], with_positions: bool) -> tuple[Place, ...]:
    """Return the last tensor for every number of positions, and vectors that are no inputs."""
    stages, vectors = dict[int, tuple[int, Place]](), dict[str, tuple[int, Place]]()
    channels: int | None = None  # of the last layer that shows it
    first_linear: Place | None = None
    seen_parameters = False
    for order, (name, module, received, returned) in enumerate(passed):
        if isinstance(module, CHANNELS_SECOND + CHANNELS_LAST):
            channels = -1 if isinstance(module, CHANNELS_LAST) else 1
        if isinstance(module, nn.Linear) and received is not None and len(received) == 2:
            if seen_parameters:
                vectors[name] = order, Place(name, is_input=True)
            else:
                first_linear = Place(name, is_input=True, is_scaled=False)
        seen_parameters |= next(module.parameters(recurse=False), None) is not None
        if returned is None or len(returned) == 2 or not (with_positions and seen_parameters):
            continue
        axis = channels or (-1 if len(returned) == 3 else 1)
        positions = returned[1:].numel() // returned[axis]
        pads = any(kind.__module__ == PADDING for kind in type(module).__mro__)
        is_stage = not (pads or INSIDE_ATTENTION.search(name))
        if is_stage and positions > 1:
            stages[positions] = order, Place(name, channels=axis)
    found = [*stages.values(), *vectors.values()]
    if found:
        return tuple(place for _, place in sorted(found, key=lambda item: item[0]))
    if first_linear is not None:
        return (first_linear,)
    raise ValueError(
        "no features were found: no Linear layer receives one vector per input"
        + ("" if with_positions else ", and positions of texts are not pooled")
        + '; name places, such as places=[acnml.features.Place("encoder")]'
    )


@torch.inference_mode(False)
@torch.no_grad()
def require_apart(
    classifier: Classifier, x: Inputs, places: Sequence[Place], all_of_them: bool
) -> tuple[Place, ...]:
    """Return the places where an input's features do not depend on the rest of its batch.

    If there are none, or they must be all, an error is raised. Two inputs of a prepared batch are
    run by themselves.
    """
    size = batches.size(x)
    if size < 3:
        return tuple(places)
    rows = torch.tensor([size - 1, 0], device="cpu")
    whole, own = (_read(classifier, some, places) for some in (x, batches.take(x, rows)))
    apart = [
        place
        for place in places
        if place not in whole or len(whole[place]) != size or _agree(whole[place][rows], own[place])
    ]
    lost = [place for place in places if place not in apart]
    if lost and (all_of_them or not apart):
        raise ValueError(
            f"the features of an input, the {lost[-1]}, depend on the rest of its batch: take "
            "features at other places"
        )
    return tuple(apart)


def _read(classifier: Classifier, x: Inputs, places: Sequence[Place]) -> dict[Place, Tensor]:
    keeper = Keeper(places)
    classifier.hooked(keeper.hooks()).logits(x)
    return keeper.run.features


def _agree(left: Tensor, right: Tensor) -> bool:
    """Whether features of the same inputs are equal up to rounding at the scale of each input."""
    tolerance, scale = torch.finfo(left.dtype).eps ** 0.5, left.flatten(1).abs().amax(1)
    if left.shape != right.shape:  # a model may cut off what is padding in its whole batch
        return left.ndim > 2
    return bool(((left - right).flatten(1).abs().amax(1) <= tolerance * scale).all())


@torch.inference_mode(False)
@torch.no_grad()
def find_last_layer(classifier: Classifier, x: Inputs, channels: int) -> Place:
    """Return the input of the layer whose outputs are logits with positions.

    It is the last convolution or Linear layer that has outputs at several positions, without those
    of a head that is only used in training. If one of them returns the logits as they are, it is
    that one.

    Args:
        classifier: the model.
        x: a prepared batch, which is run once.
        channels: the dimension of the logits that counts classes.
    """
    outputs: dict[str, Tensor] = {}

    def keeping(name: str) -> Hook:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if _is_feature(args[0]) and args[0].ndim > 2 and not AUXILIARY.search(name):
                outputs.pop(name, None)  # the order is that of the last calls
                outputs[name] = output.detach().clone()
            return output

        return hook

    layers = (_ConvNd, nn.Linear)
    modules = classifier.model.named_modules()
    hooks = {name: keeping(name) for name, module in modules if isinstance(module, layers)}
    logits = classifier.hooked(hooks).logits(x)
    size = logits.shape[channels]
    fitting = [name for name, output in outputs.items() if output.shape[channels] == size]
    exact = [name for name in fitting if torch.equal(outputs[name], logits)]
    if not fitting:
        raise ValueError(
            "no layer was found whose outputs are the logits at positions: name where features are "
            'taken, such as places=[acnml.features.Place("decoder", is_pooled=False)]'
        )
    return Place((exact or fitting)[-1], is_input=True, channels=channels, is_pooled=False)


def _is_feature(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2
