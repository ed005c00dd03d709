"""Posteriors around the averaged weights, each a stage: SWAG, KFAC, and samples made ready."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

import acnml
from acnml import Bma, Posterior, Swag, last_linear
from acnml._util.params import Params
from acnml.fitting.curvature import Factors, KroneckerCurvature
from studies.cifar10_c.methods import KFAC, Method
from studies.cifar10_c.training import load_trained
from studies.cifar10_c.workshop import Workshop
from studies.data.cifar10 import LabelledBytes, crop_and_flip, to_unit
from studies.store import Artefact, Content, Stage, Work
from studies.study.saved import curvature_content

BATCH = 128  # images at once


def swag_diagonal(workshop: Workshop) -> Artefact:
    """Return the posterior SWAG-D."""
    return _swag("fit SWAG-D", workshop, Swag.diagonal)


def swag_low_rank(workshop: Workshop) -> Artefact:
    """Return the posterior SWAG."""
    return _swag("fit SWAG", workshop, Swag.low_rank)


def curvature(workshop: Workshop) -> Artefact:
    """Find the Kronecker-factored curvature of the whole network."""
    images = workshop.study.curvature.images
    return _curvature("fit KFAC", workshop, images, lambda classifier: None, 1.0)


def head_curvature(workshop: Workshop, likelihood: float) -> Artefact:
    """Find that of the last layer, for a likelihood of this temperature."""
    images = workshop.study.curvature.head_images
    name = "fit KFAC last layer" + (", tempered" if likelihood != 1 else "")
    return _curvature(name, workshop, images, lambda c: [last_linear(c.model)], likelihood)


def prior_precision(workshop: Workshop) -> float:
    """Return that of the whole network's posterior: the training's, unless one is given."""
    study = workshop.study
    decay = study.recipe.training.weight_decay * len(workshop.data.train.labels)
    return study.curvature.prior_precision or decay


def renewed(
    build: Callable[[], Bma], method: Method, needs: tuple[Stage, ...], workshop: Workshop
) -> Artefact:
    """Find batch-norm statistics for every sample of a posterior, on augmented images as in SWAG.

    Args:
        build: makes the samples; all of them take memory, so that they are made only if needed.
        method: what they are samples for.
        needs: the stages that the posterior comes from.
        workshop: has the images.
    """
    name = f"renew batch norm {method.posterior} {method.value:g}"
    settings = (method.family, method.value, sampling(method, workshop))
    stage = Stage(name, settings, workshop.seed, needs=needs)

    def make(_: Work) -> Content:
        found = build().refreshed(_Drawn.by(workshop), progress=False).statistics
        return Content({f"{i}/{n}": t for i, each in enumerate(found) for n, t in each.items()})

    return workshop.artefacts.make(stage, make)


def sampling(method: Method, workshop: Workshop) -> dict[str, float]:
    """Return all that a method's predictions depend on beside itself and what it needs."""
    study, given = workshop.study, workshop.study.curvature.prior_precision
    renewing = len(_first(workshop.data.train, study.batch_norm_images).labels)
    by_prior = method.posterior == KFAC or (method.is_head_by_alpha and given is not None)
    return {
        **({"samples": study.samples} if method.rule in ("BMA", "MC dropout") else {}),
        **({"batch norm of its own": renewing} if method.rule == "BMA" else {}),
        **({"prior precision": prior_precision(workshop)} if by_prior else {}),
    }


def load_statistics(artefact: Artefact, samples: int) -> tuple[Params, ...]:
    """Read what `renewed` has found; nothing for a network without batch norm."""
    statistics: list[Params] = [{} for _ in range(samples)]
    for path, tensor in artefact.load().items():
        number, name = path.split("/", 1)
        statistics[int(number)][name] = tensor
    return tuple(statistics)


def rescaled(curvature: KroneckerCurvature, factor: float) -> KroneckerCurvature:
    """Return the curvature of so many times the data: each of A and G takes √ of the factor."""
    root = math.sqrt(factor)
    scaled = (Factors(f.layer, root * f.inputs, root * f.gradients) for f in curvature.factors)
    return KroneckerCurvature(curvature.mean, tuple(scaled))


# What they share -------------------------------------------------------------------------------


def _swag(name: str, workshop: Workshop, of: Callable[[Swag], Posterior]) -> Artefact:
    trained = workshop.trained()

    def make(_: Work) -> Content:
        swag = load_trained(trained).swag
        assert swag is not None  # the study's recipes collect weights
        return Content.of_posterior(of(swag))

    return workshop.artefacts.make(Stage(name, None, workshop.seed, needs=(trained.stage,)), make)


def _curvature(
    name: str,
    workshop: Workshop,
    images: int | None,
    parameters: Callable[[acnml.Classifier], list[torch.nn.Linear] | None],
    likelihood: float,
) -> Artefact:
    weights, whole = workshop.swa(), workshop.data.train
    data = _first(whole, images)

    def make(_: Work) -> Content:
        classifier = workshop.classifier(weights).tempered(likelihood)
        batches = _Batches(data, workshop)
        found = acnml.kronecker_curvature(
            classifier, batches, parameters(classifier), progress=False
        )
        return curvature_content(rescaled(found, len(whole.labels) / len(data.labels)))

    settings = (len(data.labels), likelihood)
    return workshop.artefacts.make(
        Stage(name, settings, workshop.seed, needs=(weights.stage,)), make
    )


@final
@dataclass(frozen=True, eq=False)
class _Batches:
    """Training images in batches, as they are, the same in every pass."""

    data: LabelledBytes
    workshop: Workshop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.arange(len(self.data.labels)).split(BATCH):
            yield self.workshop.inputs(self.data.images[rows]), self.data.labels[rows]


@final
@dataclass(frozen=True, eq=False)
class _Drawn:
    """Augmented training images for batch norm, drawn anew in every pass.

    So every sample of a posterior has images of its own. If all had the same few, what is odd about
    these would not average out over the samples.
    """

    workshop: Workshop
    generator: torch.Generator

    @staticmethod
    def by(workshop: Workshop) -> _Drawn:
        """Return the draws of the workshop's seed."""
        return _Drawn(workshop, torch.Generator().manual_seed(workshop.seed))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data, images = self.workshop.data.train, self.workshop.study.batch_norm_images
        drawn = torch.randperm(len(data.labels), generator=self.generator)[:images]
        for rows in drawn.split(BATCH):
            units = to_unit(data.images[rows].to(self.workshop.device))
            augmented = crop_and_flip(units, self.generator)
            yield self.workshop.normalise(augmented), data.labels[rows]


def _first(data: LabelledBytes, images: int | None) -> LabelledBytes:
    """Return the first so many training images; CIFAR-10's order is random."""
    return LabelledBytes(data.images[:images], data.labels[:images])
