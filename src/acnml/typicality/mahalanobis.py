"""Typicality: the squared Mahalanobis distance of an input's features from the training data.

With the mean m of the training features and their covariance Σ̂, d²(x) = (φ - m)ᵀ Σ̂⁻¹ (φ - m), and
s(x) = d²(x) / (mean of d² on held-out data). The features are standardised, and their correlation
matrix R is shrunk towards the identity, Σ̂ = (1 - ρ)R + ρI, with the ρ of oracle approximating
shrinkage (OAS, Chen et al. 2010). It needs nothing but n, tr R and tr R², so the training data pass
by once, and it makes Σ̂ invertible with fewer data than features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.processes import Group
from acnml.classifier import Classifier, require_classifier
from acnml.typicality.density import CONSTANT, Density, Reader, over_data
from acnml.typicality.places import Place


@final
class Moments:
    """Mean and covariance of features, in one pass and in double precision.

    Sums are taken of differences from the first batch's mean, so that no digits cancel.
    """

    def __init__(self) -> None:
        self.count = 0
        self._origin: Tensor | None = None
        self._sum = self._products = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """Count a batch (B, q) in."""
        checks.require_finite(features, "the features are", "check the model and these inputs")
        wide = features.double()
        if self._origin is None:
            self._origin = wide.mean(0)
            self._sum = torch.zeros_like(self._origin)
            self._products = self._sum.new_zeros(len(self._sum), len(self._sum))
        centred = wide - self._origin
        self.count += len(centred)
        self._sum = self._sum + centred.sum(0)
        self._products.addmm_(centred.T, centred)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of two parts of the data together."""
        if self._origin is None or other._origin is None:
            return other if self._origin is None else self
        both, moved = Moments(), other._about(self._origin)
        both.count, both._origin = self.count + other.count, self._origin
        both._sum = self._sum + moved._sum
        both._products = self._products + moved._products
        return both

    def over_processes(self, group: Group) -> Moments:
        """Return the moments of the data of all processes; every process must have some."""
        if self._origin is None:
            raise ValueError("a process has no training data: give each a part of them")
        together = self._about(group.share(self._origin))
        together.count = group.total(self.count)
        group.add_up([together._sum, together._products])
        return together

    def _about(self, origin: Tensor) -> Moments:
        """Return these moments with sums of differences from another origin."""
        assert self._origin is not None
        moved, step = Moments(), self._origin - origin
        moved.count, moved._origin = self.count, origin
        moved._sum = self._sum + self.count * step
        crossed = torch.outer(self._sum, step)
        moved._products = (
            self._products + crossed + crossed.T + self.count * torch.outer(step, step)
        )
        return moved

    @property
    def mean(self) -> Tensor:
        """The mean (q,)."""
        if self._origin is None or self.count < 2:
            raise ValueError(f"{self.count} inputs have no covariance: give more training data")
        return self._origin + self._sum / self.count

    @property
    def covariance(self) -> Tensor:
        """The covariance (q, q), a mean over the data."""
        offset = self._sum / self.count
        return self._products / self.count - torch.outer(offset, offset)

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance (q,)."""
        return self._products.diagonal() / self.count - (self._sum / self.count).square()


def oas_shrinkage(correlation: Tensor, count: int) -> float:
    """Return the share ρ of the identity in the shrunk correlation matrix (p, p) of `count` data.

    ρ = (tr R²/p² + 1) / ((n + 1)(tr R²/p² - 1/p)), at most 1: the formula of Chen et al. (2010) for
    a mean variance of 1, without its terms in 2/p, as in scikit-learn.
    """
    p = len(correlation)
    square = float((correlation**2).mean())
    below = (count + 1) * (square - 1 / p)
    return 1.0 if below <= 0 else min(1.0, (square + 1) / below)


@final
@dataclass(frozen=True, eq=False)
class Typicality(Density):
    """How atypical an input's features are among the training data: s(x), 1 on average.

    s(x) is the squared Mahalanobis distance d²(x) = ‖W(φ(x) - m)‖², divided by its mean on held-out
    data. Made by `fit_typicality` and `calibrate`. It can be saved with `acnml.save`.

    Args:
        classifier: the model.
        reader: takes the features φ.
        mean: m (q,).
        whitening: W (r, q) with WᵀW = Σ̂⁻¹. Features that are constant on the training data have a
            column of zeros: they have no scale to measure a difference by.
        typical: the mean of d² on held-out data.
        shrinkage: the share ρ of the identity in Σ̂.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> classifier = acnml.Classifier(model)
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> typicality = acnml.fit_typicality(classifier, x[:200], x[200:])
    >>> bool(typicality(5 * x[200:]).mean() > typicality(x[200:]).mean())
    True
    """

    classifier: Classifier
    reader: Reader
    mean: Tensor
    whitening: Tensor
    typical: float
    shrinkage: float

    def __post_init__(self) -> None:
        self._follow_model("mean", "whitening")
        checks.require_positive(self.typical, "typical")
        if self.whitening.ndim != 2 or self.whitening.shape[1:] != self.mean.shape:
            raise ValueError(
                f"whitening has shape {tuple(self.whitening.shape)}, but the mean has "
                f"{tuple(self.mean.shape)}: it must have a column for every feature"
            )

    @staticmethod
    def of_moments(
        classifier: Classifier, reader: Reader, moments: Moments, held_out: Tensor
    ) -> Typicality:
        """Return the typicality for moments of training features, and held-out features (N, q)."""
        mean, covariance = moments.mean, moments.covariance
        deviation = covariance.diagonal().clamp(min=0).sqrt()
        varies = (deviation > CONSTANT).nonzero()[:, 0]
        if not len(varies):
            raise ValueError("all features are constant on the training data: give other places")
        inverse = 1 / deviation[varies]
        correlation = covariance[varies][:, varies] * torch.outer(inverse, inverse)
        correlation.diagonal().fill_(1.0)
        rho = oas_shrinkage(correlation, moments.count)
        shrunk = (1 - rho) * correlation
        shrunk.diagonal().add_(rho)
        root = _inverse_root(shrunk) * inverse
        whitening = torch.zeros(len(varies), len(mean), dtype=root.dtype, device=root.device)
        whitening[:, varies] = root
        unscaled = Typicality(
            classifier, reader, mean.to(reader.shift), whitening.to(reader.shift), 1.0, rho
        )
        typical = float(unscaled.score(held_out).double().mean())
        if not (math.isfinite(typical) and typical > 0):
            raise ValueError(
                f"the mean distance of the held-out data is {typical:g}: check these data"
            )
        return Typicality(classifier, reader, unscaled.mean, unscaled.whitening, typical, rho)

    def score(self, features: Tensor) -> Tensor:
        """Return s (B,)."""
        return mahalanobis(features, self.mean, self.whitening) / self.typical

    def __repr__(self) -> str:
        places = ", ".join(str(place) for place in self.reader.places)
        return (
            f"Typicality({self.classifier!r}, {len(self.mean)} features: {places}; "
            f"shrinkage {self.shrinkage:.3g})"
        )


def mahalanobis(features: Tensor, mean: Tensor, whitening: Tensor) -> Tensor:
    """Return the squared distances ‖W(φ - m)‖² (B,)."""
    centred = features - mean
    # The model may have changed its precision since the fit.
    wide = torch.promote_types(centred.dtype, whitening.dtype)
    return (centred.to(wide) @ whitening.T.to(wide)).square().sum(-1)


def fit_typicality(
    classifier: Classifier,
    train_loader: Iterable[Any],
    held_out_loader: Iterable[Any],
    *,
    places: Sequence[Place] | None = None,
    progress: bool | None = None,
) -> Typicality:
    """Fit a `Typicality` in one pass over the training data and one over held-out data.

    `acnml.calibrate(..., typicality=True)` needs no passes of its own for it.

    Args:
        classifier: the trained model.
        train_loader: the training data; labels are not needed.
        held_out_loader: data like the training data that the network was not trained on.
        places: where to take features. By default the last tensor for every number of positions,
            and the input of every Linear layer that receives vectors.
        progress: whether to show progress bars; by default only in a terminal.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> typicality = fit_typicality(Classifier(model), [x[:200]], [x[200:]])
    >>> bool(typicality(10 * x).mean() > typicality(x).mean())
    True
    """
    require_classifier(classifier)
    moments, held_out = Moments(), list[Tensor]()
    reader = over_data(classifier, train_loader, moments.add, None, places, progress)
    over_data(classifier, held_out_loader, held_out.append, reader, places, progress)
    return Typicality.of_moments(classifier, reader, moments, torch.cat(held_out))


def _inverse_root(matrix: Tensor) -> Tensor:
    """Return W with WᵀW = M⁻¹: the inverse of a Cholesky factor."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), eye, upper=False)
