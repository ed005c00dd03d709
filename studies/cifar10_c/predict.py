"""Predictions: every method at every shift, saved in blocks; all that comes after reads only these.

What is kept of a prediction is said in `study/saved.py` and `unsolved.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from acnml import Predictor
from studies.cifar10_c.methods import DROPOUT, STEPS, Method, cuts, images_of
from studies.cifar10_c.posteriors import sampling
from studies.cifar10_c.predictors import artefacts_of, predictor
from studies.cifar10_c.study import shift
from studies.cifar10_c.unsolved import outputs_or_uniform
from studies.cifar10_c.workshop import Workshop
from studies.data.cifar10 import LabelledBytes
from studies.store import Artefact, Stage
from studies.store.work import Compute
from studies.study.tranches import Predictions

CHEAP_BLOCK, NETWORK_WIDE_BLOCK, STEPS_BLOCK = 500, 50, 5  # images: what a killed run may lose


def predict_shift(method: Method, shift: str, workshop: Workshop) -> Predictions:
    """Let a method, its knob set, see the images of a shift: costly ones in tranches."""
    data = workshop.data
    count = data.count(images_of(method, shift, workshop.study), shift)
    parts = (_predict_tranche(method, shift, rows, workshop) for rows in cuts(method, count))
    return Predictions(tuple(parts))


def _predict_tranche(method: Method, shift: str, rows: slice, workshop: Workshop) -> Artefact:
    name, what = f"predict {method.name} {shift} to {rows.stop}", (shift, rows.start, rows.stop)

    def load() -> LabelledBytes:
        images, labels = workshop.data.shifted(shift, rows.stop)
        return LabelledBytes(images[rows], labels[rows])

    return _predict(name, method, what, rows.stop - rows.start, load, workshop)


def predict_held_out(method: Method, workshop: Workshop) -> Artefact:
    """Let a method see the held-out images."""
    name, data = f"try {method.name} {method.value:g}", workshop.data.held_out
    return _predict(name, method, "held out", len(data.labels), lambda: data, workshop)


def predict_sweep(method: Method, workshop: Workshop) -> Artefact:
    """Let a method see the frontier's images: those of all corruptions, one after the other."""
    data, shifts = workshop.data, frontier_shifts(workshop)
    count = frontier_images(workshop)

    def load() -> LabelledBytes:
        parts = [data.shifted(each, count) for each in shifts]
        return LabelledBytes(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    name, what = f"sweep {method.name} {method.value:g}", (shifts, count)
    return _predict(name, method, what, count * len(shifts), load, workshop)


def frontier_shifts(workshop: Workshop) -> tuple[str, ...]:
    """Return the shifts of the frontier."""
    study = workshop.study
    return tuple(shift(name, study.frontier.severity) for name in study.corruptions)


def frontier_images(workshop: Workshop) -> int:
    """Return how many images of each there are."""
    return workshop.data.count(workshop.study.frontier.images, frontier_shifts(workshop)[0])


def _predict(
    name: str,
    method: Method,
    what: object,
    count: int,
    load: Callable[[], LabelledBytes],
    workshop: Workshop,
) -> Artefact:
    needs = tuple(artefact.stage for artefact in artefacts_of(method, workshop))
    settings = (method, what, sampling(method, workshop), workshop.data.checksum)
    stage = Stage(name, settings, workshop.seed, needs=needs)

    def prepare() -> Compute:
        built, images = _built(method, workshop), load().images
        return lambda rows: outputs_or_uniform(built, _inputs(method, images[rows], workshop))

    return workshop.artefacts.predict(stage, count, _block(method), prepare)


def _inputs(method: Method, images: Tensor, workshop: Workshop) -> Tensor:
    """Return what a predictor takes; on a CPU forward passes are faster with channels last."""
    prepare = workshop.dropout_inputs if method.posterior == DROPOUT else workshop.inputs
    sampled = method.rule in ("BMA", "MC dropout")
    layout = torch.channels_last if sampled else torch.contiguous_format
    return prepare(images).contiguous(memory_format=layout)


def _block(method: Method) -> int:
    if method.solver == STEPS:
        return STEPS_BLOCK
    return NETWORK_WIDE_BLOCK if method.is_network_wide else CHEAP_BLOCK


@lru_cache(maxsize=1)
def _built(method: Method, workshop: Workshop) -> Predictor:
    """Build a predictor once for all shifts in a row: samples of a posterior take their time."""
    return predictor(method, workshop)
