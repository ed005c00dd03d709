"""Predictions: every method at every shift, saved in blocks; all that comes after reads only these.

What is kept of a prediction is said in `study/saved.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from acnml import Acnml, Predictor
from acnml._util.params import Params
from acnml.cli._shared.digits import Labelled
from studies.rotated_mnist.methods import (
    CONVERGED,
    Method,
    artefacts_of,
    images_of,
    predictor,
)
from studies.rotated_mnist.study import LETTERS
from studies.rotated_mnist.workshop import Workshop
from studies.store import Artefact, Stage
from studies.store.work import Compute
from studies.study import saved

BLOCK = {"": 1000, "linearised": 500, "paper's steps": 50, CONVERGED: 10}


def predict_shift(method: Method, shift: str, workshop: Workshop) -> Artefact:
    """Let a method, its knob set, see the images of a shift."""
    count = workshop.data.count(images_of(method, workshop.study))
    return _predict(
        f"predict {method.name} {shift}",
        method,
        (shift, count),
        count,
        lambda: workshop.data.shifted(shift, count),
        workshop,
    )


def predict_validation(method: Method, workshop: Workshop) -> Artefact:
    """Let a method see the validation images."""
    name, data = f"validate {method.name} {method.value:g}", workshop.data.validation
    return _predict(name, method, "validation", len(data.labels), lambda: data, workshop)


def predict_sweep(method: Method, workshop: Workshop) -> Artefact:
    """Let a method see the frontier's images: those of all its shifts, one after the other."""
    frontier = workshop.study.frontier
    count = workshop.data.count(frontier.images)

    def load() -> Labelled:
        parts = [workshop.data.shifted(shift, count) for shift in frontier.shifts]
        return Labelled(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    name, what = f"sweep {method.name} {method.value:g}", (frontier.shifts, count)
    return _predict(name, method, what, count * len(frontier.shifts), load, workshop)


def shifts_of(workshop: Workshop) -> tuple[str, ...]:
    """Return all shifts that there are images of."""
    letters = () if workshop.data.letters is None else (LETTERS,)
    return (*workshop.study.shifts, *letters)


def _predict(
    name: str,
    method: Method,
    what: object,
    count: int,
    load: Callable[[], Labelled],
    workshop: Workshop,
) -> Artefact:
    needs = tuple(artefact.stage for artefact in artefacts_of(method, workshop))
    settings = (method, what, workshop.study.samples, workshop.data.checksum)
    stage = Stage(name, settings, workshop.seed, needs=needs)

    def prepare() -> Compute:
        built, images = _built(method, workshop), load().images
        return lambda rows: outputs(built, images[rows], method)

    return workshop.artefacts.predict(stage, count, BLOCK[method.solver], prepare)


@lru_cache(maxsize=1)
def _built(method: Method, workshop: Workshop) -> Predictor:
    """Build a predictor once for all shifts in a row: samples of a posterior take their time."""
    return predictor(method, workshop)


@torch.no_grad()
def outputs(predict: Predictor, images: Tensor, method: Method) -> Params:
    """Return what is saved of a batch of predictions: of converged ones the residual as well."""
    if isinstance(predict, Acnml) and method.solver == CONVERGED:
        solution = predict.solve(images)
        return {"log_lik": solution.log_lik, "residual": solution.residual}
    return saved.outputs(predict, images)
