"""ACNML beside naive CNML: a few queries, for each of which the network is trained anew.

Both start from one network, trained on fewer images, and maximise the same thing: with weight decay
w and n images, training minimises the loss of the posterior with prior precision τ = n w. ACNML has
a KFAC posterior in the place of the images; naive CNML trains on, a few epochs for every label.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import acnml
from acnml import Classifier, FactorBlock, Refit
from acnml._util.params import Params
from acnml._util.seeding import seeded
from acnml.cli._shared.digits import Labelled
from acnml.naive_cnml import refit_each
from studies.models.mlp import mlp
from studies.rotated_mnist.study import RotatedMnist
from studies.rotated_mnist.training import Batches, train_network
from studies.rotated_mnist.workshop import Workshop
from studies.store import Artefact, Content, Stage, Work
from studies.store.work import Compute
from studies.study.saved import curvature_content, load_curvature


class Comparison(NamedTuple):
    """log p_θ̂_y(y|x) (B, K) by ACNML and by naive CNML for the same queries."""

    shift: str
    labels: Tensor
    acnml: Tensor
    naive: Tensor
    naive_max: Tensor


def compare_all(workshop: Workshop) -> list[Comparison]:
    """Compare for upright and for shifted images."""
    return [compare(workshop, shift) for shift in compared_shifts(workshop.study)]


def compared_shifts(study: RotatedMnist) -> tuple[str, str]:
    """Return where the queries come from."""
    return "0°", study.naive_cnml.shift


def compare(workshop: Workshop, shift: str) -> Comparison:
    """Let ACNML and naive CNML see the same queries."""
    settings, network = workshop.study.naive_cnml, _network(workshop)
    fitted = _curvature(workshop, network)
    queries = workshop.data.shifted(shift, settings.queries)
    what = (shift, len(queries.labels), workshop.data.checksum)
    amortised = workshop.artefacts.predict(
        Stage(
            f"predict ACNML {shift}, {settings.train_images} images", what, needs=(fitted.stage,)
        ),
        len(queries.labels),
        len(queries.labels),
        lambda: _amortised(workshop, fitted, queries.images),
    )
    refit = (settings.refit_epochs, settings.refit_learning_rate, *what)
    naive = workshop.artefacts.predict(
        Stage(f"predict naive CNML {shift}", refit, needs=(network.stage,)),
        len(queries.labels),
        1,
        lambda: _refitted(workshop, network, queries.images),
    )
    likelihoods = naive.load()
    return Comparison(
        shift,
        queries.labels,
        amortised.load()["log_lik"],
        likelihoods["last"],
        likelihoods["best"],
    )


def _train_data(workshop: Workshop) -> Labelled:
    count = workshop.study.naive_cnml.train_images
    return Labelled(*(tensor[:count] for tensor in workshop.data.train))


def _network(workshop: Workshop) -> Artefact:
    settings, study = workshop.study.naive_cnml, workshop.study
    what = (settings.training, study.hidden, settings.train_images, workshop.data.checksum)

    def make(work: Work) -> Content:
        with seeded(0):
            network = _untrained(workshop)
        return train_network(network, _train_data(workshop), settings.training, 0, work)

    return workshop.artefacts.make(Stage("train on few images", what), make)


def _curvature(workshop: Workshop, network: Artefact) -> Artefact:
    def make(_: Work) -> Content:
        classifier, batches = _classifier(workshop, network), Batches(_train_data(workshop), 1000)
        return curvature_content(acnml.kronecker_curvature(classifier, batches, progress=False))

    return workshop.artefacts.make(Stage("fit KFAC few images", needs=(network.stage,)), make)


def _amortised(workshop: Workshop, fitted: Artefact, images: Tensor) -> Compute:
    curvature = load_curvature(fitted)
    data = len(_train_data(workshop).labels)
    tau = data * workshop.study.naive_cnml.training.weight_decay
    posterior = curvature.posterior(tau, FactorBlock.damped)
    classifier = Classifier(_untrained(workshop)).at(curvature.mean)

    @torch.no_grad()
    def compute(rows: slice) -> Params:
        return {"log_lik": acnml.Linearised().log_lik(classifier, posterior, images[rows])}

    return compute


def _refitted(workshop: Workshop, network: Artefact, images: Tensor) -> Compute:
    settings, classifier = workshop.study.naive_cnml, _classifier(workshop, network)
    refit = Refit(
        settings.refit_epochs,
        settings.refit_learning_rate,
        settings.training.momentum,
        settings.training.weight_decay,
    )
    batches = Batches(_train_data(workshop), settings.training.batch_size)

    def compute(rows: slice) -> Params:
        each = list(refit_each(classifier, batches, images[rows], refit, progress=False))
        last, best = (torch.stack(list(part)) for part in zip(*each, strict=True))
        return {"last": last, "best": best}

    return compute


def _classifier(workshop: Workshop, network: Artefact) -> Classifier:
    model = _untrained(workshop)
    model.load_state_dict(network.load())
    return Classifier(model)


def _untrained(workshop: Workshop) -> nn.Module:
    return mlp(10, workshop.study.hidden, workshop.data.train.images[0].numel())
