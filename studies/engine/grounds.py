"""What rules stand on: networks, and posteriors around them, each a stage."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

import acnml
from acnml import Classifier, Swag, last_linear
from acnml.fit import KroneckerCurvature
from acnml.posteriors import Posterior
from studies.data import Labelled
from studies.engine.method import TAU, Method
from studies.engine.workshop import Workshop
from studies.store import Artefact, Content, Stage, Work
from studies.training import BayesByBackprop, load_trained, train_mean_field

BATCH = 500  # inputs at once when a curvature is measured


class Pair(NamedTuple):
    """A network and the posterior around it, where there is one."""

    classifier: Classifier
    posterior: Posterior | None = None


@dataclass(frozen=True)
class Ground(ABC):
    """What a rule stands on.

    Attributes:
        network: the network around which it is, whose inputs predictions take.
    """

    network: str

    @abstractmethod
    def artefacts(self, method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
        """Make, or find, all artefacts that a method's predictions depend on."""

    @abstractmethod
    def pairs(self, method: Method, workshop: Workshop) -> tuple[Pair, ...]:
        """Return networks and posteriors as the method's knob has them; several are an ensemble."""

    def settings(self, method: Method, workshop: Workshop) -> Mapping[str, Any]:
        """Return what predictions depend on beside the method and the artefacts."""
        return {}


@final
@dataclass(frozen=True)
class Networks(Ground):
    """A network without a posterior, or an ensemble of them.

    Attributes:
        network: whose weights are taken.
        members: of the ensemble; 0 takes the networks of all the study's seeds.
    """

    members: int = 1

    def artefacts(self, method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
        """Return the weights of all members."""
        if not self.members:
            shops = (workshop.of_seed(seed) for seed in workshop.study.seeds)
            return tuple(shop.weights(self.network) for shop in shops)
        return tuple(workshop.weights(self.network, member) for member in range(self.members))

    def pairs(self, method: Method, workshop: Workshop) -> tuple[Pair, ...]:
        """Return all members."""
        return tuple(
            Pair(_classifier(self.network, weights, method, workshop))
            for weights in self.artefacts(method, workshop)
        )


@final
@dataclass(frozen=True)
class MeanField(Ground):
    """The mean-field posterior of Bayes by Backprop, and the network at its mean.

    Attributes:
        network: whose model is trained, on the inputs it learns from; its weights are not used.
        training: the settings.
    """

    training: BayesByBackprop

    def artefacts(self, method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
        """Train the posterior."""
        model, data = workshop.study.networks[self.network].model, workshop.train_data(self.network)
        few = () if len(data.labels) == len(workshop.data.train.labels) else (len(data.labels),)
        settings = (model.settings, self.training, workshop.data.train_checksum, *few)
        stage = Stage("train Bayes by Backprop", settings, workshop.seed)

        def make(work: Work) -> Content:
            module = model.untrained(workshop.seed)
            seed = workshop.seed
            return train_mean_field(module, data, model.augmented, self.training, seed, work)

        return (workshop.make(stage, make),)

    def pairs(self, method: Method, workshop: Workshop) -> tuple[Pair, ...]:
        """Return the posterior with its covariance scaled by the knob."""
        (fitted,) = self.artefacts(method, workshop)
        posterior = fitted.load_saved()
        classifier = workshop.untrained(self.network).at(posterior.mean)
        return (Pair(classifier.tempered(_likelihood(method)), _scaled(posterior, method)),)


@final
@dataclass(frozen=True)
class SwagPosterior(Ground):
    """SWAG around the averaged weights of a network.

    Attributes:
        network: takes the average of its collected weights.
        form: `Swag.diagonal` or `Swag.low_rank`.
    """

    form: Callable[[Swag], Posterior]

    def artefacts(self, method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
        """Return the averaged weights, and the posterior."""
        trained = workshop.trained(self.network)
        name = f"fit SWAG {self.form.__name__.replace('_', ' ')}"
        stage = Stage(name, None, workshop.seed, needs=(trained.stage,))

        def make(_: Work) -> Content:
            return Content.of_saved(self.form(load_trained(trained).collected))

        return workshop.weights(self.network), workshop.make(stage, make)

    def pairs(self, method: Method, workshop: Workshop) -> tuple[Pair, ...]:
        """Return the posterior with its covariance scaled by the knob."""
        weights, fitted = self.artefacts(method, workshop)
        classifier = _classifier(self.network, weights, method, workshop)
        return (Pair(classifier, _scaled(fitted.load_saved(), method)),)


Parameters = Callable[[Classifier], list[torch.nn.Linear] | None]


def whole_network(_: Classifier) -> None:
    """Cover all parameters."""


def last_layer(classifier: Classifier) -> list[torch.nn.Linear]:
    """Cover the last linear layer."""
    return [last_linear(classifier.model)]


@final
@dataclass(frozen=True)
class KfacLaplace(Ground):
    """A Kronecker-factored Laplace posterior around a network, or around every one of an ensemble.

    Attributes:
        network: whose weights are the mean.
        cover: `whole_network` or `last_layer`.
        inputs: how many training inputs measure the curvature, which is then scaled to all of them;
            None takes all.
        prior_precision: where the knob is not the prior precision; None is that of training, weight
            decay times the number of training inputs.
        form: how the prior joins the curvature: `KroneckerCurvature.damped` as in the paper, or
            `KroneckerCurvature.posterior` for the exact sum.
        members: of the ensemble.
    """

    cover: Parameters = whole_network
    inputs: int | None = None
    prior_precision: float | None = None
    form: Callable[[KroneckerCurvature, float], Posterior] = KroneckerCurvature.posterior
    members: int = 1

    def artefacts(self, method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
        """Return the weights and the curvature of all members, one after the other."""
        return tuple(
            artefact
            for member in range(self.members)
            for artefact in self._fitted(method, workshop, member)
        )

    def pairs(self, method: Method, workshop: Workshop) -> tuple[Pair, ...]:
        """Return the posteriors as the knob has them.

        α and the scale of a covariance are the same thing: α log p + log q has the maximiser of
        log p + log q_α with Σ → αΣ.
        """
        found = self.artefacts(method, workshop)
        return tuple(
            Pair(
                _classifier(self.network, weights, method, workshop),
                self._posterior(fitted.load_saved(), method, workshop),
            )
            for weights, fitted in zip(found[::2], found[1::2], strict=True)
        )

    def settings(self, method: Method, workshop: Workshop) -> Mapping[str, Any]:
        """Return the prior precision, where it is not the knob."""
        if method.knob == TAU:
            return {}
        return {"prior precision": self.prior(workshop)}

    def prior(self, workshop: Workshop) -> float:
        """Return the prior precision that is used where it is not the knob."""
        if self.prior_precision is not None:
            return self.prior_precision
        training = workshop.study.networks[self.network].training
        if training is None:
            raise ValueError(f"{self.network} is not trained: give its prior_precision")
        return training.weight_decay * len(workshop.train_data(self.network).labels)

    def _posterior(
        self, curvature: KroneckerCurvature, method: Method, workshop: Workshop
    ) -> Posterior:
        by_prior = method.knob == TAU
        tau = method.value if by_prior else self.prior(workshop)
        assert tau is not None  # the knob is set
        posterior = self.form(curvature, tau)
        return posterior if by_prior else _scaled(posterior, method)

    def _fitted(self, method: Method, workshop: Workshop, member: int) -> tuple[Artefact, Artefact]:
        weights, whole = workshop.weights(self.network, member), workshop.train_data(self.network)
        data, likelihood = whole.first(self.inputs), _likelihood(method)
        tempered = ", tempered" if likelihood != 1 else ""
        stage = Stage(
            f"fit KFAC {self.cover.__name__.replace('_', ' ')} {self.network}{tempered}",
            (len(data.labels), likelihood),
            weights.stage.seed,
            needs=(weights.stage,),
        )

        def make(_: Work) -> Content:
            classifier = workshop.classifier(self.network, weights).tempered(likelihood)
            batches = Batches(data, workshop, self.network)
            found = acnml.fit.fit_curvature(
                classifier, batches, layers=self.cover(classifier), progress=False
            )
            assert isinstance(found, KroneckerCurvature)
            return Content.of_saved(rescaled(found, len(whole.labels) / len(data.labels)))

        return weights, workshop.make(stage, make)


# What they share -------------------------------------------------------------------------------


def _likelihood(method: Method) -> float:
    if method.likelihood is None:
        raise ValueError(f"find the likelihood's temperature of {method.name} first")
    return method.likelihood


def _scaled(posterior: Posterior, method: Method) -> Posterior:
    if method.value is None or method.scale is None:
        raise ValueError(f"choose the {method.knob} of {method.name} first")
    return posterior.scaled(method.scale * method.value)


def _classifier(name: str, weights: Artefact, method: Method, workshop: Workshop) -> Classifier:
    return workshop.classifier(name, weights).tempered(_likelihood(method))


@final
@dataclass(frozen=True, eq=False)
class Batches:
    """Training data in batches, prepared for a network, the same in every pass."""

    data: Labelled
    workshop: Workshop
    network: str
    size: int = BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.arange(len(self.data.labels)).split(self.size):
            inputs = self.workshop.prepared(self.network, self.data.inputs[rows])
            yield inputs, self.data.labels[rows]


def rescaled(curvature: KroneckerCurvature, factor: float) -> KroneckerCurvature:
    """Return the curvature of `factor` times the data: A and G each take its square root."""
    root = math.sqrt(factor)
    return curvature.with_sums(lambda total: root * total if total.is_floating_point() else total)
