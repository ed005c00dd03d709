"""How typical an input is: what all scores share, from the network's tensors to a number.

A `Reader` turns a network's run into one standardised vector of features. A `Density` maps this
vector to s(x): a squared distance from the training data, divided by its mean on held-out data. So
s(x) is 1 for an average input like the held-out data, and larger for an atypical one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.nn import functional

from acnml._engine.trust import checked_logits
from acnml._util import batches, checks
from acnml._util.batches import Inputs, arrays_for_arrays, split_labels
from acnml._util.params import Params, is_same_or_rounded
from acnml._util.passes import each_batch, in_chunks
from acnml.classifier import Classifier, require_classifier, without_autocast
from acnml.typicality.places import Place, Taps, find_places

# Features beyond this number are folded: covariances and distances cost its square.
MOST_FEATURES = 4096

# Inputs with which places are looked for, and on whose scale features are read. The number is odd,
# so that a tensor that begins with positions is hardly taken for one that begins with the batch.
PROBED = 13

# A feature whose deviation is at most this share of its scale varies by rounding only.
CONSTANT = 1e-5


class Observer(Protocol):
    """Sees features from several places of a network while it runs for another purpose."""

    def taps(self, classifier: Classifier) -> Taps:
        """View a classifier so that its runs can be read."""
        ...

    def read(self, features: Tensor) -> Tensor:
        """Return what there is to know about pooled features (B, p): a vector or a number each."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Reader:
    """Features of an input: pooled at some places, on a common scale, and folded if too many.

    Folding adds up features that are `MOST_FEATURES` apart, with random signs: a sparse random
    projection, which keeps inner products in expectation (Weinberger et al. 2009).

    Args:
        places: where the features are taken.
        shift: is subtracted from the features (p,).
        scale: divides them (p,).
        signs: ±1 (p,), by which features are multiplied before they are folded.
    """

    places: tuple[Place, ...]
    shift: Tensor
    scale: Tensor
    signs: Tensor | None = None

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def found(classifier: Classifier, x: Inputs, places: Sequence[Place] | None = None) -> Reader:
        """Return a reader on the scale of the first inputs of a prepared batch.

        Without places, it reads at those that `find_places` finds.
        """
        some = batches.take(x, slice(0, PROBED))
        taps = Taps(classifier, find_places(classifier, some) if places is None else places)
        taps.classifier.logits(some)
        return Reader.of(taps.places, taps.features())

    @staticmethod
    def of(places: tuple[Place, ...], features: Tensor) -> Reader:
        """Return a reader on the scale of some features (B, p)."""
        shift, scale = features.mean(0), features.std(0, correction=0)
        # A feature that is zero for all of these inputs has the scale 1. If it is hardly ever more
        # than zero in training, as a nearly dead unit, it then counts as constant. On its own tiny
        # scale, a single input could make it dominate the score.
        size = torch.where(shift == 0, torch.ones_like(shift), shift.abs())
        scale = torch.where(scale > CONSTANT * shift.abs(), scale, size)
        if features.shape[1] <= MOST_FEATURES:
            return Reader(places, shift, scale)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(2, shift.shape, generator=generator, device="cpu")
        return Reader(places, shift, scale, (2 * drawn - 1).to(shift))

    def to(self, device: torch.device) -> Reader:
        """Return the reader on a device."""
        signs = None if self.signs is None else self.signs.to(device)
        return Reader(self.places, self.shift.to(device), self.scale.to(device), signs)

    def taps(self, classifier: Classifier) -> Taps:
        """View a classifier so that its runs can be read."""
        return Taps(classifier, self.places)

    def read(self, features: Tensor) -> Tensor:
        """Return pooled features (B, p) on the common scale, at most `MOST_FEATURES` of them."""
        if features.shape[1] != len(self.shift):
            raise ValueError(
                f"the model has {features.shape[1]} features at these places, but had "
                f"{len(self.shift)} when the typicality was fitted: use the same model"
            )
        return read(features, self.shift, self.scale, self.signs)


def read(features: Tensor, shift: Tensor, scale: Tensor, signs: Tensor | None) -> Tensor:
    """Return features (B, p) on a common scale, folded if there are signs; see `Reader`."""
    scaled = (features - shift) / scale
    if signs is None:
        return scaled
    return _folded(scaled * signs)


def _folded(features: Tensor) -> Tensor:
    """Add up features (..., p) that are `MOST_FEATURES` apart."""
    padded = functional.pad(features, (0, -features.shape[-1] % MOST_FEATURES))
    return padded.unflatten(-1, (-1, MOST_FEATURES)).sum(-2)


class Watch(NamedTuple):
    """Receives what an observer reads, one batch at a time."""

    observer: Observer
    tell: Callable[[Tensor], None]


class Density(ABC):
    """A score s(x) of how atypical an input is among the training data.

    It is 1 on average on held-out data. It is also a score for the detection of inputs that are out
    of distribution.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> classifier = acnml.Classifier(model)
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> typicality = acnml.fit_typicality(classifier, x[:200], x[200:])
    >>> isinstance(typicality, acnml.Density)
    True
    >>> typicality(x[:5]).shape
    torch.Size([5])
    """

    classifier: Classifier
    reader: Reader

    @abstractmethod
    def score(self, features: Tensor) -> Tensor:
        """Return s (B,) for features (B, q) as the reader gives them, without checks."""

    @final
    def taps(self, classifier: Classifier) -> Taps:
        """View a classifier so that its runs can be read."""
        return self.reader.taps(classifier)

    @final
    def read(self, features: Tensor) -> Tensor:
        """Return s (B,) for pooled features (B, p), or raise an error if it is not finite."""
        with without_autocast(features):
            score = self.score(self.reader.read(features))
        return checks.require_finite(score, "the typicality is", "check the model and these inputs")

    @final
    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return s(x) (B,): about 1 for data like the training data, higher for atypical inputs."""
        taps = self.taps(self.classifier)

        def score(chunk: Inputs) -> Tensor:
            checked_logits(self.classifier, chunk, taps.classifier)
            return self.read(taps.features())

        return torch.cat([*in_chunks(self.classifier.prepare(x), score)])

    @final
    def _follow_model(self, *names: str) -> None:
        """Copy the reader and the named tensors to the model's device; for `__post_init__`.

        Tensors from a file lie anywhere in memory, and the rounding of matrix products depends on
        it. Copies are aligned.
        """
        require_classifier(self.classifier)
        device = self.classifier.device
        object.__setattr__(self, "reader", self.reader.to(device))
        for name in names:
            object.__setattr__(self, name, getattr(self, name).to(device, copy=True))

    @final
    def at(self, tensors: Params) -> Density:
        """View the same score with some tensors of its network replaced: `Classifier.at`."""
        other = copy.copy(self)
        object.__setattr__(other, "classifier", self.classifier.at(tensors))
        return other

    @final
    def require_view_of(self, classifier: Classifier) -> None:
        """Raise an error unless a classifier has the model and the weights this was fitted on."""
        if classifier.model is not self.classifier.model:
            raise ValueError(
                "the typicality was fitted on another model than the predictor's; fit it on the "
                "same model"
            )
        own, its = self.classifier.tensors, classifier.tensors
        for name in sorted({*self.classifier.overrides, *classifier.overrides}):
            if not is_same_or_rounded(its[name], own[name]):
                raise ValueError(
                    f"the typicality was fitted with another {name!r} than the predictor's; fit it "
                    "on the same view of the model, such as classifier.at(statistics)"
                )


@torch.inference_mode(False)
@torch.no_grad()
def over_data(
    classifier: Classifier,
    loader: Iterable[Any],
    use: Callable[[Tensor], None],
    reader: Reader | None,
    places: Sequence[Place] | None,
    progress: bool | None,
) -> Reader:
    """Call a function with the features (B, q) of every batch; return the reader.

    Without a reader, the first batch makes one, at the given places or at those that are found.
    """
    found = reader

    def use_batch(batch: Any) -> None:
        nonlocal found
        x = classifier.prepare(split_labels(batch)[0])
        found = found or Reader.found(classifier, x, places)
        own, taps = found, found.taps(classifier)

        def use_chunk(chunk: Inputs) -> None:
            checked_logits(classifier, chunk, taps.classifier)
            use(own.read(taps.features()))

        for _ in in_chunks(x, use_chunk):
            pass

    each_batch(loader, use_batch, "typicality", progress)
    assert found is not None  # the first batch made one
    return found
