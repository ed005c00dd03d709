"""How far an input's features lie from the training data, by class.

The features φ(x) of an input are compared with the mean of every class, in units of one covariance
within the classes: d_k² = (φ - m_k)ᵀ Σ̂⁻¹ (φ - m_k). Three scores follow.

- *by class*: m(x) = min_k d_k², divided by its mean on held-out data without the 1 % that is
  farthest. About 1 for data like the
  training data, larger for atypical inputs. This is the score that `calibrate` uses.
- *over all classes*: the same with one mean, and the covariance over all data.
- *relative*: min_k d_k² minus the distance over all classes (Ren et al. 2021). It is high for
  inputs that belong to the data but to none of the classes. It says nothing about other shifts.

The covariance. Features are divided by their deviations within the classes, in the training
or the held-out data, whichever is larger. If there are more of
them than `MOST_RANK`, the directions of most variance are kept, and the squared length of the rest
counts as it is, divided by its mean variance. In these directions the correlation matrix R is
shrunk to (1 - ρ)R + ρI, with the ρ under which held-out data are most probable. So more features
than data are no problem: a covariance that fits the training data too well is shrunk until
held-out data are as typical as the training data are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from acnml._util.processes import Group
from acnml._util.torch_state import one_thread

# Directions of features whose covariance is estimated; distances cost this times the features.
MOST_RANK = 256

# Features whose deviation is at most this share of their mean vary by rounding only.
CONSTANT = 1e-5

# The share of held-out data that counts as outliers and has no say.
OUTLIERS = 0.01

# Variance of a direction of scaled features, at least.
LEAST_VARIANCE = 1e-3

# Values of ρ that are tried.
SHRINKAGES = tuple(10 ** (-step / 4) for step in range(21))

# Up to this many features all directions are computed at once; else by subspace iteration.
DENSE, ITERATIONS = 1024, 12


@final
class Moments:
    """Counts, sums and products of features by class, from one pass, in double precision.

    Products are summed for all classes together: one (q, q) matrix. Sums are taken of differences
    from the first batch's mean, so that no digits cancel.
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device="cpu")
        self._origin: Tensor | None = None
        self._sums = self._products = torch.zeros((), device="cpu")

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Count a batch of features (B, q) with classes (B,) in."""
        wide, labels = features.detach().double().cpu(), labels.cpu()
        if self._origin is None:
            self._origin = wide.mean(0)
            self._sums = wide.new_zeros(len(self.counts), wide.shape[1])
            self._products = wide.new_zeros(wide.shape[1], wide.shape[1])
        centred = wide - self._origin
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        self._sums.index_add_(0, labels, centred)
        self._products.addmm_(centred.T, centred)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of two parts of the data together."""
        if self._origin is None or other._origin is None:
            return other if self._origin is None else self
        both, moved = Moments(len(self.counts)), other._about(self._origin)
        both._origin, both.counts = self._origin, self.counts + moved.counts
        both._sums = self._sums + moved._sums
        both._products = self._products + moved._products
        return both

    def over_processes(self, processes: Group) -> Moments:
        """Return the moments of the data of all processes; every process must have some."""
        if self._origin is None:
            raise ValueError("there are no training data, or a process has none of them")
        together = self._about(processes.share(self._origin))
        together.counts = processes.summed(together.counts)
        together._sums = processes.summed(together._sums)
        together._products = processes.summed(together._products)
        return together

    def _about(self, origin: Tensor) -> Moments:
        """Return these moments with sums of differences from another origin."""
        assert self._origin is not None
        step, moved = self._origin - origin, Moments(len(self.counts))
        crossed, total = torch.outer(self._sums.sum(0), step), self.counts.sum()
        moved._origin, moved.counts = origin, self.counts.clone()
        moved._sums = self._sums + torch.outer(self.counts, step)
        moved._products = self._products + crossed + crossed.T + total * torch.outer(step, step)
        return moved

    def as_one_class(self) -> Moments:
        """Return the same moments without classes."""
        one = Moments(1)
        one._origin, one._products = self._origin, self._products
        one.counts, one._sums = self.counts.sum(0, keepdim=True), self._sums.sum(0, keepdim=True)
        return one

    @property
    def count(self) -> int:
        """The number of inputs."""
        return int(self.counts.sum())

    @property
    def mean(self) -> Tensor:
        """The mean over all classes (q,)."""
        if self._origin is None or self.count < 2:
            raise ValueError(f"{self.count} inputs have no covariance: give more training data")
        return self._origin + self._sums.sum(0) / self.count

    @property
    def class_means(self) -> Tensor:
        """The mean of every class (K, q); that of all for a class without data."""
        means = self.mean.expand(len(self.counts), -1).clone()
        assert self._origin is not None  # `mean` requires it
        known = self.counts > 0
        means[known] = self._origin + self._sums[known] / self.counts[known, None]
        return means

    @property
    def covariance(self) -> Tensor:
        """The covariance over all data (q, q)."""
        offset = self._sums.sum(0) / self.count
        return self._products / self.count - torch.outer(offset, offset)

    @property
    def covariance_within(self) -> Tensor:
        """The mean covariance within the classes (q, q)."""
        offsets = self.class_means - self.mean
        return self.covariance - (offsets.T * self.counts) @ offsets / self.count


class Distances(NamedTuple):
    """Squared distances of inputs from the training data, (B,) each."""

    by_class: Tensor  # from the nearest class
    overall: Tensor  # from all classes together

    @property
    def relative(self) -> Tensor:
        """The distance from the nearest class beyond that from the data."""
        return self.by_class - self.overall


@final
@dataclass(frozen=True, eq=False)
class Atypicality:
    """A score m(x) of features: about 1 for data like the training data, larger for atypical ones.

    Attributes:
        mean: of all training data (q,).
        scale: 1 / deviation of every feature within the classes (q,); 0 for constant features.
        directions: orthonormal directions of scaled features (r, q).
        stretch: 1 / deviation along every direction within the classes (r,), after shrinkage.
        rest: 1 / variance of what is in none of the directions; 0 if they are all there are.
        class_means: differences of the class means from the mean, along the stretched directions
            (K, r).
        shares: of the classes in the training data (K,); 0 for a class without data.
        typical: the mean distance from the nearest class on held-out data without outliers.
        shrinkage: the share ρ of the identity in the correlation matrix.
        overfit: the mean distance of held-out data from their classes, divided by that of the
            training data. 1 is ideal; a covariance from too few data has more.

    >>> data = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (data[:, 0] > 0).long()
    >>> moments = Moments(classes=2)
    >>> moments.add(data[:800], labels[:800])
    >>> score = Atypicality.fit(moments, data[800:], labels[800:])
    >>> bool(score(3 * data).mean() > 3 * score(data).mean())
    True
    """

    mean: Tensor
    scale: Tensor
    directions: Tensor
    stretch: Tensor
    rest: float
    class_means: Tensor
    shares: Tensor
    typical: float
    shrinkage: float
    overfit: float

    @staticmethod
    @one_thread()
    def fit(
        moments: Moments,
        features: Tensor,
        labels: Tensor,
        rank: int = MOST_RANK,
        shrinkages: Sequence[float] = SHRINKAGES,
        least_rank: int = 1,
    ) -> Atypicality:
        """Fit to moments of the training data, and to held-out features (N, q) and classes (N,).

        Args:
            moments: of the training data.
            features: of held-out data. They decide the shrinkage and the unit of the score.
            labels: their classes.
            rank: directions of features to keep at most.
            shrinkages: values of ρ to choose from.
            least_rank: directions of features to keep at least.
        """
        if moments.count < 2 * int((moments.counts > 0).sum()):
            # Single inputs of a class show no covariance within it: one mean stands for all.
            moments, labels = moments.as_one_class(), torch.zeros_like(labels)
        within = moments.covariance_within
        size = moments.covariance.diagonal().clamp(min=0).sqrt() + moments.mean.abs()
        gaps = features.detach().double().cpu() - moments.class_means[labels.cpu()]
        # A unit that is nearly dead in training may be alive in held-out data: the larger deviation
        # keeps it from dominating all distances.
        deviation = torch.maximum(within.diagonal(), gaps.square().mean(0)).clamp(min=0).sqrt()
        varies = within.diagonal().clamp(min=0).sqrt() > CONSTANT * size
        if not bool(varies.any()):
            raise ValueError(
                "no feature varies within the classes of the training data: give several different "
                "inputs of a class, or other features"
            )
        scale = torch.where(varies, 1 / deviation, 0.0)
        units, count = torch.outer(scale, scale), int(varies.sum())
        offsets = (moments.class_means - moments.mean) * scale
        wide = _ordinary(gaps * scale)
        main = _main_directions(moments.covariance * units, min(rank, count))
        along = main @ (within * units) @ main.T
        model = _most_likely(main, along, wide, count, shrinkages, least_rank)
        found = Atypicality(
            mean=moments.mean.float(),
            scale=scale.float(),
            directions=model.directions.float(),
            stretch=model.var.rsqrt().float(),
            rest=model.rest,
            class_means=(offsets @ model.directions.T * model.var.rsqrt()).float(),
            shares=(moments.counts / moments.count).float(),
            typical=1.0,
            shrinkage=model.shrinkage,
            overfit=model.overfit,
        )
        typical = float(_trimmed(found(features.float().cpu()).double()).mean())
        if not (math.isfinite(typical) and typical > 0):
            raise ValueError(f"the mean distance of the held-out data is {typical:g}: check them")
        return replace(found, typical=typical)

    def __call__(self, features: Tensor) -> Tensor:
        """Return m (B,) for features (B, q): the distance from the nearest class, in its unit."""
        along, beside = self._split(features)
        return (self._from_nearest(along) + beside) / self.typical

    def distances(self, features: Tensor) -> Distances:
        """Return squared distances, in no unit, for scores that detect unknown inputs."""
        along, beside = self._split(features)
        known = self.class_means[self.shares > 0]
        # (I + MᵀΠM)⁻¹ = I - Mᵀ(Π⁻¹ + MMᵀ)⁻¹M: the covariance over all classes is that within them
        # and that of their means M, with shares Π.
        inner = known @ known.T + torch.diag(1 / self.shares[self.shares > 0])
        products = along @ known.T
        removed = (products * torch.linalg.solve(inner, products.T).T).sum(-1)
        overall = along.square().sum(-1) - removed + beside
        return Distances(self._from_nearest(along) + beside, overall)

    def to(self, device: torch.device | str | torch.dtype) -> Atypicality:
        """Return the same score with its tensors on a device, or in a precision."""
        moved: dict[str, Any] = {name: each.to(device) for name, each in self.tensors.items()}
        return replace(self, **moved)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The attributes that are tensors, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return stretched coordinates (B, r), and the squared length of the rest (B,)."""
        if features.shape[-1] != len(self.mean):
            raise ValueError(
                f"there are {features.shape[-1]} features, but the score was fitted on "
                f"{len(self.mean)}"
            )
        scaled = (features.to(self.mean.dtype) - self.mean).mul_(self.scale)
        along = scaled @ self.directions.T
        if not self.rest:
            return along * self.stretch, torch.zeros_like(along[:, 0])
        # Not as a difference of squares, in which digits cancel.
        beside = (scaled - along @ self.directions).square().sum(-1)
        return along * self.stretch, self.rest * beside

    def _from_nearest(self, along: Tensor) -> Tensor:
        """Return the squared distances (B,) from the nearest of the classes that have data."""
        # Kept lengths would save little, and torch.compile cannot trace a cached property.
        lengths = self.class_means.square().sum(-1).masked_fill(self.shares == 0, torch.inf)
        products = torch.addmm(lengths, along, self.class_means.T, alpha=-2)
        return (products.amin(-1) + along.square().sum(-1)).clamp(min=0)


def _ordinary(gaps: Tensor) -> Tensor:
    """Leave out the rows (N, q) that are farthest from their classes."""
    length = gaps.square().sum(-1)
    return gaps[length <= _trimmed(length).max()]


def _trimmed(values: Tensor) -> Tensor:
    """Leave out the largest values (N,): single outliers must not decide what is typical."""
    return values.sort().values[: max(1, round((1 - OUTLIERS) * len(values)))]


def _main_directions(matrix: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors (r, q) of the largest eigenvalues of a covariance matrix."""
    size = len(matrix)
    if size <= DENSE:
        return torch.linalg.eigh(matrix)[1][:, size - rank :].T.contiguous()
    # Subspace iteration. Directions of nearly equal variance may mix, which does no harm.
    generator = torch.Generator(matrix.device).manual_seed(0)
    start = torch.randn(size, rank, generator=generator, dtype=matrix.dtype, device=matrix.device)
    basis = torch.linalg.qr(start)[0]
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ basis)[0]
    return basis.T.contiguous()


class _Gaussian(NamedTuple):
    """A covariance of scaled features, and how probable held-out data are under it."""

    directions: Tensor  # (r, q)
    var: Tensor  # (r,)
    rest: float  # 1 / variance of every other direction
    shrinkage: float
    loss: float
    overfit: float


def _most_likely(
    main: Tensor,
    within: Tensor,
    held_out: Tensor,
    count: int,
    shrinkages: Sequence[float],
    least_rank: int,
) -> _Gaussian:
    """Choose how many directions to keep, and ρ, by the likelihood of held-out data.

    Args:
        main: directions (r, q), those of most variance last.
        within: the covariance within the classes along them (r, r).
        held_out: differences of held-out features from the means of their classes (N, q).
        count: the number of features that vary.
        shrinkages: values of ρ to choose from.
        least_rank: directions to keep at least.
    """
    coordinates, length = held_out @ main.T, held_out.square().sum(-1)
    models, rank = list[_Gaussian](), len(main)
    while rank >= max(1, min(least_rank, len(main))):
        own, turn = torch.linalg.eigh(within[-rank:, -rank:])
        own, seen = own.clamp(min=0), (coordinates[:, -rank:] @ turn).square()
        left, beside = count - rank, float((length - seen.sum(-1)).mean())
        # Directions without variance, as of features that repeat others, show rounding only.
        var_beside = max(beside / left, LEAST_VARIANCE) if left else 1.0
        rest, seen_var = 1 / var_beside if left else 0.0, seen.mean(0)
        for rho in shrinkages:
            var = (1 - rho) * own + rho * own.mean()
            found, trained = float((seen_var / var).sum()), float((own / var).sum())
            loss = float(var.log().sum()) + found + left * (math.log(var_beside) + 1)
            overfit = (found + beside * rest) / (trained + (count - float(own.sum())) * rest)
            directions = turn.T @ main[-rank:]
            models.append(_Gaussian(directions, var, rest, rho, loss, overfit))
        rank //= 2
    return min(models, key=lambda model: model.loss)
