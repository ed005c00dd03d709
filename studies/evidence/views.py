"""What the methods know of data: a network's logits, kernels and densities, and other networks.

Everything is fitted on training data. Temperatures are chosen on held-out data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from acnml import Acnml, Classifier, McDropout, Pnml, fit_pnml, last_linear
from acnml._algebra.kernels import SpectralKernel
from acnml._engine.layers import only_linear
from acnml.atypicality import Atypicality, Moments
from acnml.fit import KroneckerCurvature, fit_curvature
from acnml.posteriors import Posterior
from acnml.predictors.ensemble import log_mean
from acnml.tuning.temperature import least_nll_temperature
from studies.engine.study import checksum
from studies.evidence.recorded import Recorded, recorded
from studies.evidence.settings import EvidenceStudy
from studies.evidence.subjects import HELD_OUT, TRAIN, Subject
from studies.features import RELATIVE_PRIOR
from studies.store import Stage, Store

BLOCK = 50  # inputs whose weights are all solved for at once
WEIGHT_DECAY = 1e-4  # of the networks for digits: the prior of all weights


@final
@dataclass(frozen=True, eq=False)
class View:
    """What the methods know of a split or shift.

    Attributes:
        logits: z / T in double precision (N, K).
        kernel: V / T², the covariance of the tempered logits.
        unit_kernel: the same with a prior precision of 1.
        extended: the same of a head that is extended by the features of s.
        score: s (N,), the distance of the features from the mean of all training data.
        by_class: m (N,), the distance from the nearest class, as in `calibrate`.
        neighbours: the distance from the k-th nearest training input (N,).
        leverage: of the last layer's input, for pNML (N,).
        labels: (N,).
        samples: of Bayesian model averages.
        members: the views of all networks of an ensemble.
        ensemble: logarithms of their mean probabilities, at the temperature of least NLL.
        dropout: the same of dropout masks.
        whole: α -> log-likelihoods (N, K) of ACNML over all weights.
    """

    logits: Tensor
    kernel: SpectralKernel
    unit_kernel: SpectralKernel
    extended: SpectralKernel
    score: Tensor
    by_class: Tensor
    neighbours: Tensor
    leverage: Tensor
    labels: Tensor
    samples: int
    members: tuple[View, ...] = ()
    ensemble: Tensor | None = None
    dropout: Tensor | None = None
    whole: Callable[[float], Tensor] | None = None


@final
@dataclass(frozen=True, eq=False)
class Neighbours:
    """The squared distance to the k-th nearest training input, in standardised features."""

    mean: Tensor
    scale: Tensor  # 1 / deviation; 0 for constant features
    kept: Tensor  # standardised training features (n, p)
    k: int
    typical: float = 1.0  # the mean on held-out data

    @staticmethod
    def of(train: Tensor, held_out: Tensor, k: int) -> Neighbours:
        """Keep all training features (n, p)."""
        mean, deviation = train.mean(0), train.std(0, correction=0)
        scale = torch.where(deviation > 1e-5, 1 / deviation, 0.0)
        found = Neighbours(mean, scale, (train - mean) * scale, k)
        return replace(found, typical=float(found(held_out).mean()))

    def __call__(self, features: Tensor) -> Tensor:
        """Return the score (B,), 1 on average on held-out data."""
        points = ((features - self.mean) * self.scale).split(512)
        nearest = [torch.cdist(some, self.kept).kthvalue(self.k).values for some in points]
        return torch.cat(nearest).double().square() / self.typical


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A network's posteriors and densities."""

    layer: nn.Linear
    temperature: float
    curvature: KroneckerCurvature
    overall: Atypicality
    by_class: Atypicality
    neighbours: Neighbours
    pnml: Pnml
    count: int  # training data
    samples: int

    @staticmethod
    def of(network: nn.Module, train: Recorded, held_out: Recorded, study: EvidenceStudy) -> Fitted:
        """Fit everything on the training data, and the temperature on held-out data."""
        layer = last_linear(network)
        temperature = least_nll_temperature(
            torch.log_softmax(held_out.logits.double(), -1), held_out.labels
        )
        tempered = Classifier(layer).tempered(temperature)
        curvature = fit_curvature(tempered, [(train.inputs, train.labels)], progress=False)
        assert isinstance(curvature, KroneckerCurvature)
        return Fitted(
            layer=layer,
            temperature=temperature,
            curvature=curvature,
            overall=_atypicality(train, held_out, 1),
            by_class=_atypicality(train, held_out, train.logits.shape[1]),
            neighbours=Neighbours.of(train.taps, held_out.taps, study.neighbours),
            pnml=fit_pnml(Classifier(layer), [train.inputs], progress=False),
            count=len(train.labels),
            samples=study.samples,
        )

    @cached_property
    def posteriors(self) -> tuple[Posterior, Posterior]:
        """With a prior that leaves the decision to the data, and with a precision of 1."""
        default = RELATIVE_PRIOR * self.curvature.mean_eigenvalue()
        return self.curvature.posterior(default), self.curvature.posterior(1.0)

    def view(self, data: Recorded) -> View:
        """Return what the methods need to know."""
        site = only_linear(Classifier(self.layer), ["weight", "bias"])
        assert site is not None
        inputs = nn.functional.pad(data.inputs, (0, 1), value=1.0)
        kernels = [p.output_kernel(site.layer, inputs).double() for p in self.posteriors]
        kernel, unit = (each for each in kernels if isinstance(each, SpectralKernel))
        score = self.overall(data.taps).double()
        square = self.temperature**-2
        return View(
            logits=data.logits.double() / self.temperature,
            kernel=kernel.scaled(square),
            unit_kernel=unit.scaled(square),
            extended=self._extended(kernel, score).scaled(square),
            score=score,
            by_class=self.by_class(data.taps).double(),
            neighbours=self.neighbours(data.taps),
            leverage=self.pnml.leverage(data.inputs).double(),
            labels=data.labels,
            samples=self.samples,
        )

    def _extended(self, kernel: SpectralKernel, score: Tensor) -> SpectralKernel:
        """Add (d²/n) G⁻¹ to V; both are diagonal in the eigenbasis of G.

        Both factors of a `KroneckerCurvature` have √n in them. G has none here.
        """
        G = self.curvature.factors[0].gradients.double() / math.sqrt(self.count)
        values = (kernel.basis.T @ G @ kernel.basis).diagonal()
        leverage = score * self.overall.typical / self.count
        added = leverage.unsqueeze(1) / (values + RELATIVE_PRIOR * values.mean())
        return SpectralKernel(kernel.basis, kernel.var + added)


def _atypicality(train: Recorded, held_out: Recorded, classes: int) -> Atypicality:
    """Fit a score by class; a single class stands for all of them."""
    moments = Moments(classes)
    moments.add(train.taps, train.labels % classes)
    return Atypicality.fit(moments, held_out.taps, held_out.labels % classes)


@final
class Views:
    """The views of a subject: its own network, its ensemble, dropout and all weights.

    Args:
        own: the subject.
        study: the settings.
        store: where recorded outputs are kept.
    """

    def __init__(self, own: Subject, study: EvidenceStudy, store: Store) -> None:
        self._own, self._study, self._store = own, study, store
        self._networks = own.members or (own,)
        self._fits = [self._fitted(each) for each in self._networks]
        self._best: dict[str, float] = {}  # temperatures of averages
        self.held_out = self.of(HELD_OUT)

    @property
    def temperature(self) -> float:
        """The best temperature of the network."""
        return self._fits[0].temperature

    def of(self, part: str) -> View:
        """Return the view of a split or shift."""
        own, *others = (
            fit.view(recorded(each, part, self._store))
            for each, fit in zip(self._networks, self._fits, strict=True)
        )
        if others:
            members = (own, *others)
            probs = log_mean([torch.log_softmax(each.logits, -1) for each in members])
            own = replace(own, members=members, ensemble=self._tempered("ensemble", probs, own))
        if self._own.dropout is not None:
            own = replace(own, dropout=self._tempered("dropout", self._dropout(part), own))
        if self._own.whole:
            own = replace(own, whole=lambda alpha: self._whole(part, alpha))
        return own

    def _fitted(self, own: Subject) -> Fitted:
        train, held_out = (recorded(own, p, self._store) for p in (TRAIN, HELD_OUT))
        return Fitted.of(own.trained, train, held_out, self._study)

    def _tempered(self, name: str, log_probs: Tensor, view: View) -> Tensor:
        """Divide by the temperature of least NLL; the held-out data come first."""
        if name not in self._best:
            self._best[name] = least_nll_temperature(log_probs, view.labels)
        return log_probs / self._best[name]

    def _dropout(self, part: str) -> Tensor:
        own, data = self._own, self._own.data(part)
        predictor = McDropout(Classifier(own.trained_with_dropout), self._study.samples)
        decided = (own.decided, self._study.dropout, self._study.samples, checksum(data))
        stage = Stage(f"dropout {own.name} {part}", decided, own.seed)

        def compute(rows: slice) -> dict[str, Tensor]:
            return {"log_probs": predictor(own.prepare(data.inputs[rows]))}

        return (
            self._store.predict(stage, len(data.labels), 250, compute).load()["log_probs"].double()
        )

    @cached_property
    def _whole_posterior(self) -> tuple[Classifier, Posterior]:
        """Return a Kronecker-factored posterior of all weights, with the prior of training."""
        own, data = self._own, self._own.data(TRAIN)
        tempered = Classifier(own.trained).tempered(self.temperature)
        batches = zip(data.inputs.split(500), data.labels.split(500), strict=True)
        loader = [(own.prepare(x), y) for x, y in batches]
        curvature = fit_curvature(tempered, loader, progress=False)
        return tempered, curvature.posterior(WEIGHT_DECAY * len(data.labels))

    def _whole(self, part: str, alpha: float) -> Tensor:
        own, data = self._own, self._own.data(part)
        seen = checksum(own.train, own.held_out, data)
        decided = (own.decided, seen, f"{alpha:.6g}")
        stage = Stage(f"all weights {own.name} {part}", decided, own.seed)
        predictors: list[Acnml] = []

        def compute(rows: slice) -> dict[str, Tensor]:
            if not predictors:
                classifier, posterior = self._whole_posterior
                predictors.append(Acnml(classifier, posterior, alpha=alpha, on_unsolved="ignore"))
            solved = predictors[0].solve(own.prepare(data.inputs[rows]))
            return {"log_lik": solved.log_lik}

        found = self._store.predict(stage, len(data.labels), BLOCK, compute)
        return found.load()["log_lik"].double()
