"""ACNML compared with naive CNML: a few queries, for each of which the network is trained again.

Both start from one network, trained on fewer images, and maximise the same objective: with weight
decay w and n images, training minimises the loss of the posterior with prior precision τ = n w.
ACNML has a KFAC posterior instead of the images; naive CNML trains a few more epochs per label.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import acnml
from acnml import FactorBlock, Refit
from acnml.fitting.refitting import refit_each
from studies.engine.grounds import Batches, KfacLaplace
from studies.engine.method import ACNML, LINEARISED, Method
from studies.engine.workshop import Workshop
from studies.rotated_mnist.settings import UPRIGHT, NaiveCnml
from studies.store import Stage
from studies.store.work import Compute

FEW = "network of few images"
GROUND = KfacLaplace(FEW, form=FactorBlock.damped)
AMORTISED = Method(ACNML, FEW, LINEARISED)


class Comparison(NamedTuple):
    """log p_θ̂_y(y|x) (B, K) by ACNML and by naive CNML for the same queries."""

    shift: str
    labels: Tensor
    acnml: Tensor
    naive: Tensor
    naive_max: Tensor


def compare_all(workshop: Workshop) -> list[Comparison]:
    """Compare for upright and for shifted images."""
    settings: NaiveCnml = workshop.study.settings.naive_cnml
    return [compare(workshop, settings, shift) for shift in (UPRIGHT, settings.shift)]


def compare(workshop: Workshop, settings: NaiveCnml, shift: str) -> Comparison:
    """Let ACNML and naive CNML see the same queries."""
    network, fitted = GROUND.artefacts(AMORTISED, workshop)
    queries = workshop.data.load(shift, workshop.data.count(settings.queries))
    count = len(queries.labels)
    what = (shift, count, workshop.data.checksum)

    def amortised() -> Compute:
        ((classifier, posterior),) = GROUND.pairs(AMORTISED, workshop)
        assert posterior is not None
        predict = acnml.Acnml(classifier, posterior, on_unsolved="ignore")

        @torch.no_grad()
        def compute(rows: slice) -> dict[str, Tensor]:
            return {"log_lik": predict.log_lik(queries.inputs[rows])}

        return compute

    def refitted() -> Compute:
        training = settings.training
        refit = Refit(
            settings.refit_epochs,
            settings.refit_learning_rate,
            training.momentum,
            training.weight_decay,
        )
        classifier = workshop.classifier(FEW, network)
        batches = Batches(workshop.train_data(FEW), workshop, FEW, training.batch_size)

        def compute(rows: slice) -> dict[str, Tensor]:
            each = list(
                refit_each(classifier, batches, queries.inputs[rows], refit, progress=False)
            )
            last, best = (torch.stack(list(part)) for part in zip(*each, strict=True))
            return {"last": last, "best": best}

        return compute

    fast = Stage(f"predict ACNML {shift}, {FEW}", what, needs=(network.stage, fitted.stage))
    refit = (settings.refit_epochs, settings.refit_learning_rate, *what)
    slow = Stage(f"predict naive CNML {shift}", refit, needs=(network.stage,))
    ours = workshop.artefacts.predict(fast, count, count, amortised).load()
    theirs = workshop.artefacts.predict(slow, count, 1, refitted).load()
    return Comparison(shift, queries.labels, ours["log_lik"], theirs["last"], theirs["best"])
