"""What the methods know of data: tempered logits, scores of atypicality, distances to neighbours.

Everything is fitted on training data. Temperature, shrinkage and units are chosen on held-out data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from acnml.atypicality import SHRINKAGES, Atypicality, Moments
from acnml.calibration.search import least_nll_temperature
from acnml.features import direction_and_length
from studies.evidence.recorded import Recorded
from studies.evidence.subjects import HELD_OUT, TRAIN, Subject

# Forms of the score of atypicality.
BY_CLASS, OVERALL = "by class", "one mean"
LAST, DIAGONAL = "last layer's input", "variances alone"
UNIT, AS_THEY_ARE = "unit length alone", "features as they are"
EARLIER = "one mean of features as they are"  # version 0.2
FORMS = (BY_CLASS, OVERALL, LAST, UNIT, AS_THEY_ARE, EARLIER, DIAGONAL)

NEIGHBOURS = 10  # for k-NN distances; as many as density-aware calibration has for ImageNet
PRIOR = 1e-2  # of a last layer's posterior, as a share of the curvature's mean eigenvalue
FEW = 10  # classes of a network whose last layer's posterior is no Kronecker product, at most
BLOCK = 500  # inputs whose distances to all training data are held at once


@final
@dataclass(frozen=True, eq=False)
class View:
    """What the methods know of a split or shift.

    Attributes:
        data: as the network sees them.
        logits: z / T (N, K).
        scores: form -> m (N,), about 1 for data like the training data.
        neighbours: squared distance from the k-th nearest training input, by place (L, N).
        proximity: of the held-out data, for ProCal (N,).
        basis: eigenvectors (K, K) of the covariance of z / T under a Kronecker posterior of the
            last layer.
        spectrum: its eigenvalues (N, K).
        variances: of z / T under the exact block of the GGN of every class (N, K); (N, 0) for more
            than `FEW` classes.
        train: the training data.
        detectors: name -> score (N,), higher for inputs of no class.
        members: of an ensemble.
    """

    data: Recorded
    logits: Tensor
    scores: Mapping[str, Tensor]
    neighbours: Tensor
    proximity: Tensor
    basis: Tensor
    spectrum: Tensor
    variances: Tensor
    train: Recorded
    detectors: Mapping[str, Tensor]
    members: tuple[View, ...] = ()

    @property
    def labels(self) -> Tensor:
        """The classes (N,)."""
        return self.data.labels


@final
class Fitted:
    """A network's temperature, scores and posterior."""

    def __init__(self, train: Recorded, held_out: Recorded) -> None:
        self.temperature = least_nll_temperature(held_out.logits, held_out.labels)
        self._train, self._held_out = train, held_out
        self._scores = {form: _score(form, train, held_out) for form in FORMS}
        self._bank = {name: unit(own) for name, own in _means(train).items()}
        self._posterior = _Kronecker.of(train, self.temperature)
        self._blocks = _Blocks.of(train, self.temperature)
        self._subspace = _Subspace.of(train)

    def view(self, data: Recorded, is_held_out: bool = False) -> View:
        """Return what the methods need to know."""
        means = {name: unit(own) for name, own in _means(data).items()}
        nearest = [kth(means[name], bank, NEIGHBOURS)[:, -1] for name, bank in self._bank.items()]
        last, logits = data.last, data.logits / self.temperature
        first = int(is_held_out)  # held-out data are their own nearest neighbours
        near = kth(unit(last), unit(self._held_out.last), NEIGHBOURS + first)[:, first:]
        distances = self._scores[BY_CLASS].distances(data.features)
        detectors = {
            "maximum probability": -torch.softmax(data.logits, -1).amax(-1),
            "energy": -torch.logsumexp(data.logits, -1),
            "k-NN": kth(unit(last), unit(self._train.last), NEIGHBOURS)[:, -1],
            "ViM": self._subspace.score(data),
            "Mahalanobis": distances.by_class,
            "relative Mahalanobis": distances.relative,
        }
        scores = {form: own(_chosen(form, data)).double() for form, own in self._scores.items()}
        return View(
            data=data,
            logits=logits,
            scores=scores,
            neighbours=torch.stack(nearest).double(),
            proximity=(-near).exp().mean(-1).double(),
            basis=self._posterior.outputs,
            spectrum=self._posterior.spectrum(last) / self.temperature**2,
            variances=self._blocks.variances(last) / self.temperature**2,
            train=self._train,
            detectors=detectors,
        )


def _chosen(form: str, data: Recorded) -> Tensor:
    """Return the features of a form of the score."""
    if form == LAST:
        return direction_and_length(data.last)
    if form == UNIT:
        return torch.cat([unit(own) for own in data.places.values()], dim=1)
    if form in (AS_THEY_ARE, EARLIER):
        return torch.cat(list(data.places.values()), dim=1)
    return data.features


def _score(form: str, train: Recorded, held_out: Recorded) -> Atypicality:
    count, classes = train.logits.shape
    if (
        form in (OVERALL, EARLIER) or count < 2 * classes
    ):  # one input of a class shows no covariance
        classes = 1
    moments = Moments(classes)
    moments.add(_chosen(form, train), train.labels % classes)
    shrinkages = (1.0,) if form == DIAGONAL else SHRINKAGES
    features, labels = _chosen(form, held_out), held_out.labels % classes
    return Atypicality.fit(moments, features, labels, shrinkages=shrinkages)


def unit(features: Tensor) -> Tensor:
    """Return vectors of unit length."""
    return functional.normalize(features, dim=-1)


def kth(points: Tensor, bank: Tensor, k: int) -> Tensor:
    """Return squared distances to the k nearest vectors of a bank, in ascending order (N, k)."""
    parts = [torch.cdist(some, bank).square() for some in points.split(BLOCK)]
    return torch.cat([part.topk(min(k, len(bank)), largest=False).values for part in parts])


def _means(data: Recorded) -> dict[str, Tensor]:
    """Return the features of every place; where positions were pooled, their means alone."""
    return {
        name: own[:, : own.shape[1] // 2] if "output" in name else own
        for name, own in data.places.items()
    }


@final
@dataclass(frozen=True, eq=False)
class _Kronecker:
    """A Kronecker-factored Laplace posterior of the last layer, Σ = G⁻¹ ⊗ A⁻¹ in eigenbases."""

    inputs: Tensor  # eigenvectors of A (d + 1, d + 1)
    outputs: Tensor  # of G (K, K)
    precision: Tensor  # (d + 1, K)

    @staticmethod
    def of(train: Recorded, temperature: float) -> _Kronecker:
        """Fit it to training data of a network with a temperature."""
        probs = torch.softmax(train.logits / temperature, -1)
        G = (torch.diag(probs.sum(0)) - probs.T @ probs) / len(probs) / temperature**2
        a = functional.pad(train.last, (0, 1), value=1.0)
        values, inputs = torch.linalg.eigh(a.T @ a)
        own, outputs = torch.linalg.eigh(G)
        curvature = torch.outer(values.clamp(min=0), own.clamp(min=0))
        return _Kronecker(inputs, outputs, curvature + PRIOR * curvature.mean())

    def spectrum(self, last: Tensor) -> Tensor:
        """Return the variance of logits along the eigenvectors of G (N, K)."""
        a = functional.pad(last, (0, 1), value=1.0)
        return (a @ self.inputs).square() @ (1 / self.precision)


@final
@dataclass(frozen=True, eq=False)
class _Blocks:
    """A Laplace posterior of the last layer with the exact block of the GGN of every class."""

    roots: Tensor  # L with LLᵀ = H⁻¹ (K, d + 1, d + 1); (0, 0, 0) for many classes

    @staticmethod
    def of(train: Recorded, temperature: float) -> _Blocks:
        """Fit it to training data of a network with a temperature."""
        probs = torch.softmax(train.logits / temperature, -1)
        a = functional.pad(train.last, (0, 1), value=1.0)
        if probs.shape[1] > FEW:
            return _Blocks(a.new_empty(0, 0, 0))
        weights = (probs * (1 - probs)).T / temperature**2
        blocks = torch.stack([(a * w.unsqueeze(-1)).T @ a for w in weights])
        mean = blocks.diagonal(dim1=1, dim2=2).mean()
        eye = torch.eye(a.shape[1])
        inverses = torch.linalg.inv((blocks + PRIOR * mean * eye).double())
        return _Blocks(torch.linalg.cholesky((inverses + inverses.mT) / 2).float())

    def variances(self, last: Tensor) -> Tensor:
        """Return the variance of every logit (N, K), or (N, 0)."""
        a = functional.pad(last, (0, 1), value=1.0)
        if len(self.roots) == 0:
            return a.new_empty(len(a), 0)
        return torch.stack([(a @ root).square().sum(-1) for root in self.roots], dim=1)


@final
@dataclass(frozen=True, eq=False)
class _Subspace:
    """What lies outside the main directions of the last layer's inputs (ViM, Wang et al. 2022)."""

    origin: Tensor
    rest: Tensor  # minor directions (d, r)
    scale: float

    @staticmethod
    def of(train: Recorded) -> _Subspace:
        """Keep half of the directions, and bring residuals to the scale of the logits."""
        origin = train.last.mean(0)
        vectors = torch.linalg.eigh((train.last - origin).T @ (train.last - origin))[1]
        rest = vectors[:, : max(1, vectors.shape[1] // 2)]
        size = ((train.last - origin) @ rest).norm(dim=-1).mean()
        return _Subspace(origin, rest, float(train.logits.amax(-1).mean() / size))

    def score(self, data: Recorded) -> Tensor:
        """Return the scaled residual minus the energy of the logits (N,)."""
        residual = ((data.last - self.origin) @ self.rest).norm(dim=-1)
        return self.scale * residual - torch.logsumexp(data.logits, -1)


@final
class Views:
    """The views of a subject and of its ensemble."""

    def __init__(self, own: Subject) -> None:
        self._own = (own, *own.members)
        self._record = cache(lambda number, part: self._own[number].record(part))
        self._fits = [
            Fitted(self._record(n, TRAIN), self._record(n, HELD_OUT)) for n in range(len(self._own))
        ]
        self.train = self._record(0, TRAIN)
        self.temperature = self._fits[0].temperature
        self.held_out = self.of(HELD_OUT)

    def of(self, part: str) -> View:
        """Return the view of a split or shift."""
        first, *others = (
            fit.view(self._record(number, part), part == HELD_OUT)
            for number, fit in enumerate(self._fits)
        )
        return replace(first, members=(first, *others)) if others else first
