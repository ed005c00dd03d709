"""NearestNeighbours: the squared distance to the k-th nearest training input, in feature space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from acnml._util import checks
from acnml.classifier import Classifier, require_classifier
from acnml.typicality.density import CONSTANT, Density, Reader, over_data
from acnml.typicality.mahalanobis import Moments
from acnml.typicality.places import Place

# Distances that are computed at once.
BLOCK = 512


@final
@dataclass(frozen=True, eq=False)
class NearestNeighbours(Density):
    """How far an input is from its k-th nearest training input: s(x), 1 on average.

    s(x) is the squared Euclidean distance of standardised features, divided by its mean on held-out
    data (Tomani et al. 2023 use such distances for temperatures). Made by `fit_neighbours`.

    Args:
        classifier: the model.
        reader: takes the features.
        mean: of the training features (q,).
        scale: their inverse standard deviations (q,), 0 for constant features.
        kept: standardised features of training inputs (n, q).
        k: which neighbour.
        typical: the mean squared distance of held-out data.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> classifier = acnml.Classifier(model)
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> neighbours = acnml.fit_neighbours(classifier, x[:200], x[200:], k=5)
    >>> neighbours(x[:5]).shape
    torch.Size([5])
    """

    classifier: Classifier
    reader: Reader
    mean: Tensor
    scale: Tensor
    kept: Tensor
    k: int
    typical: float

    def __post_init__(self) -> None:
        self._follow_model("mean", "scale", "kept")
        checks.require_positive(self.typical, "typical")
        if not 1 <= self.k <= len(self.kept):
            raise ValueError(f"k must be between 1 and {len(self.kept)}, got {self.k}")

    def score(self, features: Tensor) -> Tensor:
        """Return s (B,)."""
        points = (features - self.mean) * self.scale
        kept = self.kept.to(points.dtype)  # the model may have changed its precision since the fit
        nearest = [
            torch.cdist(some, kept).kthvalue(self.k, dim=-1).values for some in points.split(BLOCK)
        ]
        return torch.cat(nearest).square() / self.typical


def fit_neighbours(
    classifier: Classifier,
    train_loader: Iterable[Any],
    held_out_loader: Iterable[Any],
    *,
    k: int = 10,
    most: int = 10_000,
    places: Sequence[Place] | None = None,
    progress: bool | None = None,
) -> NearestNeighbours:
    """Fit `NearestNeighbours` in one pass over the training data and one over held-out data.

    Args:
        classifier: the trained model.
        train_loader: the training data; labels are not needed.
        held_out_loader: data like the training data that the network was not trained on.
        k: which neighbour.
        most: maximum number of training inputs to keep, chosen at random.
        places: where to take features, as for `fit_typicality`.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> classifier = acnml.Classifier(model)
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> neighbours = acnml.fit_neighbours(classifier, x[:200], x[200:], k=5)
    >>> bool(neighbours(5 * x[200:]).mean() > neighbours(x[200:]).mean())
    True
    """
    require_classifier(classifier)
    k, most = checks.require_integer(k, "k"), checks.require_integer(most, "most", least=1)
    if not 1 <= k <= most:
        raise ValueError(f"k must be between 1 and {most}, got {k}")
    moments, sample, held_out = _Marginals(), _Sample(most), list[Tensor]()

    def use(features: Tensor) -> None:
        moments.add(features)
        sample.add(features)

    reader = over_data(classifier, train_loader, use, None, places, progress)
    over_data(classifier, held_out_loader, held_out.append, reader, places, progress)
    return neighbours_of(classifier, reader, moments, sample.kept, torch.cat(held_out), k)


def neighbours_of(
    classifier: Classifier,
    reader: Reader,
    moments: Moments | _Marginals,
    kept: Tensor,
    held_out: Tensor,
    k: int,
) -> NearestNeighbours:
    """Return the density for training features to keep (n, q) and held-out features (N, q)."""
    deviation = moments.variance.clamp(min=0).sqrt()
    inverse = torch.where(deviation > CONSTANT, 1 / deviation, 0.0).to(kept)
    mean = moments.mean.to(kept)
    points = (kept - mean) * inverse
    unscaled = NearestNeighbours(classifier, reader, mean, inverse, points, k, 1.0)
    return replace(unscaled, typical=float(unscaled.score(held_out).double().mean()))


@final
class _Marginals:
    """Mean and variance of every feature, in one pass and in double precision.

    These are `Moments` without the products of different features: q numbers in place of q². Sums
    are taken of differences from the first batch's mean, so that no digits cancel.
    """

    def __init__(self) -> None:
        self._count, self._origin = 0, torch.zeros(())
        self._sum = self._squares = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """Count a batch (B, q) in."""
        checks.require_finite(features, "the features are", "check the model and these inputs")
        wide = features.double()
        if self._count == 0:
            self._origin = wide.mean(0)
            self._sum = self._squares = torch.zeros_like(self._origin)
        centred = wide - self._origin
        self._count += len(centred)
        self._sum = self._sum + centred.sum(0)
        self._squares = self._squares + centred.square().sum(0)

    @property
    def mean(self) -> Tensor:
        """The mean (q,)."""
        if self._count < 2:
            raise ValueError(f"{self._count} inputs have no variance: give more training data")
        return self._origin + self._sum / self._count

    @property
    def variance(self) -> Tensor:
        """The variance (q,), a mean over the data."""
        return self._squares / self._count - (self._sum / self._count).square()


@final
class _Sample:
    """A random choice of at most `most` rows: those with the smallest of random keys.

    Rows are collected until there are twice as many, and only then chosen among: to choose after
    every batch would copy the whole sample each time. The choice is the same.
    """

    def __init__(self, most: int) -> None:
        self._most, self._generator = most, torch.Generator().manual_seed(0)
        self._keys, self._rows = list[Tensor](), list[Tensor]()

    def add(self, rows: Tensor) -> None:
        """Take a batch (B, q) into account."""
        self._keys.append(torch.rand(len(rows), generator=self._generator, device="cpu"))
        self._rows.append(rows)
        if sum(map(len, self._keys)) >= 2 * self._most:
            self._choose()

    @property
    def kept(self) -> Tensor:
        """The chosen rows (n, q), in the order of the data."""
        self._choose()
        return self._rows[0]

    def _choose(self) -> None:
        keys, rows = torch.cat(self._keys), torch.cat(self._rows)
        # Stable: of rows with equal keys, the first one is kept, however the data are cut.
        chosen = keys.argsort(stable=True)[: self._most].sort().values
        self._keys, self._rows = [keys[chosen]], [rows[chosen.to(rows.device)]]
