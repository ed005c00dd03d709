"""Predictions: every method at every shift, saved in blocks. Everything after reads only these."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from acnml.predictors import Predictor
from studies.data import Labelled
from studies.engine.method import Method
from studies.engine.predictors import outputs, predictor, sampling
from studies.engine.study import Frontier
from studies.engine.workshop import Workshop
from studies.store import Artefact, Stage
from studies.store.work import Compute

ENDS = (10, 100, 250, 1000)  # where one tranche of inputs ends and the next begins


def tranches(inputs: int) -> list[slice]:
    """Cut the first inputs at the same places, however many there are.

    >>> tranches(120)
    [slice(0, 10, None), slice(10, 100, None), slice(100, 120, None)]
    """
    bounds = [0, *(end for end in ENDS if end < inputs), inputs]
    return [slice(*pair) for pair in pairwise(bounds)]


class Predictions(NamedTuple):
    """Saved predictions of consecutive inputs."""

    parts: tuple[Artefact, ...]

    def load(self) -> dict[str, Tensor]:
        """Read all of them."""
        loaded = [part.load() for part in self.parts]
        return {name: torch.cat([each[name] for each in loaded]) for name in loaded[0]}

    @property
    def seconds_per_input(self) -> float:
        """The time of one prediction."""
        inputs = sum(part.facts["inputs"] for part in self.parts)
        return sum(part.seconds for part in self.parts) / inputs


def predict_shift(method: Method, shift: str, workshop: Workshop) -> Predictions:
    """Let a method, its knob set, see the inputs of a shift."""
    share, data = workshop.study.share(method, shift), workshop.data
    count = data.count(share.inputs)
    cuts = tranches(count) if share.in_tranches else [slice(0, count)]

    def tranche(rows: slice) -> Artefact:
        def load() -> Labelled:
            inputs, labels = data.load(shift, rows.stop)
            return Labelled(inputs[rows], labels[rows])

        name = f"predict {method.name} {shift} to {rows.stop}"
        what = (shift, rows.start, rows.stop)
        return _predict(name, method, what, rows.stop - rows.start, share.block, load, workshop)

    return Predictions(tuple(tranche(rows) for rows in cuts))


def predict_held_out(method: Method, workshop: Workshop) -> Artefact:
    """Let a method see the held-out data."""
    name, data = f"try {method.name} {method.value:g}", workshop.data.held_out
    block = workshop.study.share(method, workshop.study.base).block
    return _predict(name, method, "held out", len(data.labels), block, lambda: data, workshop)


def predict_sweep(method: Method, workshop: Workshop) -> Artefact:
    """Let a method see the inputs of the frontier: those of all its shifts, one after another."""
    frontier, data = frontier_of(workshop), workshop.data
    count = data.count(frontier.inputs)

    def load() -> Labelled:
        parts = [data.load(shift, count) for shift in frontier.shifts]
        return Labelled(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    name, what = f"sweep {method.name} {method.value:g}", (frontier.shifts, count)
    block = workshop.study.share(method, workshop.study.base).block
    total = count * len(frontier.shifts)
    return _predict(name, method, what, total, block, load, workshop)


def frontier_of(workshop: Workshop) -> Frontier:
    """Return the study's frontier."""
    if workshop.study.frontier is None:
        raise ValueError(f"{workshop.study.name} has no frontier to sweep")
    return workshop.study.frontier


def _predict(
    name: str,
    method: Method,
    what: object,
    count: int,
    block: int,
    load: Callable[[], Labelled],
    workshop: Workshop,
) -> Artefact:
    ground = workshop.study.grounds[method.posterior]
    needs = tuple(artefact.stage for artefact in ground.artefacts(method, workshop))
    settings = (method, what, sampling(method, workshop), workshop.data.checksum)
    stage = Stage(name, settings, workshop.seed, needs=needs)
    layout = workshop.study.prepare

    def prepare() -> Compute:
        built, inputs = _built(method, workshop), load().inputs

        def compute(rows: slice) -> dict[str, Tensor]:
            prepared = workshop.prepared(ground.network, inputs[rows])
            return outputs(built, prepared if layout is None else layout(method, prepared), method)

        return compute

    return workshop.artefacts.predict(stage, count, block, prepare)


@lru_cache(maxsize=1)
def _built(method: Method, workshop: Workshop) -> Predictor:
    """Build a predictor once for consecutive shifts: posterior samples take time."""
    return predictor(method, workshop)
