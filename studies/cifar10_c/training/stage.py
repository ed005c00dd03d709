"""The stage of a study that trains a network, made by all processes together.

Artefacts belong to the leading process: it looks for the artefact, and tells the others whether
there is something to train.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from studies.cifar10_c.training.keeper import Nobody
from studies.cifar10_c.training.loop import train
from studies.cifar10_c.training.processes import Processes
from studies.cifar10_c.training.settings import Recipe, Training
from studies.cifar10_c.training.task import Task, weights_file
from studies.data.cifar10 import LabelledBytes
from studies.store import Artefact, Content, Stage, Store, Work
from studies.store.record import digest


def training_stage(recipe: Recipe, data: LabelledBytes, seed: int) -> Stage:
    """Say what decides a training: the recipe, the images and any weights it starts from.

    The number of processes is no part of it, as no kind of hardware is.
    """
    images = digest(*(tensor.contiguous().numpy().data.cast("B") for tensor in data))
    weights = _checksum(weights_file(recipe)) if recipe.start == "given" else None
    return Stage(f"train {recipe.model}", (recipe, images, weights), seed)


def make_together(
    store: Store,
    stage: Stage,
    training: Training,
    prepare: Callable[[], Task],
    processes: Processes,
) -> Artefact | None:
    """Return the stage's artefact, trained where it is missing; None in processes that do not lead.

    Args:
        store: used by the leading process alone.
        stage: of this training; its seed is that of all that is random.
        training: how it is done.
        prepare: loads the network and its images, where there is something to train.
        processes: all that train together; every one must make the same call.
    """
    if not processes.leads:
        if _leader_says(processes):
            train(prepare(), training, stage.seed, processes, Nobody())
        return None
    asked = False

    def make(work: Work) -> Content:
        nonlocal asked
        asked = _leader_says(processes, something_to_do=True)
        trained = train(prepare(), training, stage.seed, processes, work)
        assert trained is not None  # this process leads
        return trained.content()

    artefact = store.make(stage, make)
    if not asked:
        _leader_says(processes, something_to_do=False)
    return artefact


def _leader_says(processes: Processes, something_to_do: bool = False) -> bool:
    """Hear, in all processes, what the leading one says."""
    word = torch.tensor(int(something_to_do), device=processes.device)
    return bool(processes.as_leader(word))


def _checksum(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no weight file {path}")
    return digest(path.read_bytes())
