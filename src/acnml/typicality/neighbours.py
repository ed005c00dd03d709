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
        nearest = [
            torch.cdist(some, self.kept).kthvalue(self.k, dim=-1).values
            for some in points.split(BLOCK)
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
        most: training inputs to keep at most; a random choice among all.
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
    moments, sample, held_out = Moments(), _Sample(most), list[Tensor]()

    def use(features: Tensor) -> None:
        moments.add(features)
        sample.add(features)

    reader = over_data(classifier, train_loader, use, None, places, progress)
    over_data(classifier, held_out_loader, held_out.append, reader, places, progress)
    return neighbours_of(classifier, reader, moments, sample.kept, torch.cat(held_out), k)


def neighbours_of(
    classifier: Classifier,
    reader: Reader,
    moments: Moments,
    kept: Tensor,
    held_out: Tensor,
    k: int,
) -> NearestNeighbours:
    """Return the density for training features to keep (n, q) and held-out features (N, q)."""
    deviation = moments.covariance.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(deviation > CONSTANT, 1 / deviation, 0.0).to(kept)
    mean = moments.mean.to(kept)
    points = (kept - mean) * inverse
    unscaled = NearestNeighbours(classifier, reader, mean, inverse, points, k, 1.0)
    return replace(unscaled, typical=float(unscaled.score(held_out).double().mean()))


@final
class _Sample:
    """A random choice of rows: those with the smallest of random keys."""

    def __init__(self, most: int) -> None:
        self._most, self._generator = most, torch.Generator().manual_seed(0)
        self._keys, self._rows = torch.empty(0), list[Tensor]()

    def add(self, rows: Tensor) -> None:
        keys = torch.cat([self._keys, torch.rand(len(rows), generator=self._generator)])
        every = torch.cat([*self._rows, rows])
        chosen = keys.argsort()[: self._most].sort().values
        self._keys, self._rows = keys[chosen], [every[chosen.to(every.device)]]

    @property
    def kept(self) -> Tensor:
        return self._rows[0]
