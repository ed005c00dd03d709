"""Questions to an assistant (CLINC150): heads on a frozen encoder, and questions of no class.

A shift adds questions that belong to no class: those that the data set provides, or those of two
domains that are left out of training. No answer to them is right.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from studies import text
from studies.data import Labelled
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import TEXT, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, UNKNOWN, Subject, with_unknown
from studies.store import Content, Stage, Store, Work


def questions(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return a head for all intents, for all seeds, and one for every pair of domains left out.

    One seed is enough for the pairs: they are the repetitions.
    """
    settings = text.TextStudy(folds=study.folds, seeds=study.seeds)
    tasks = text.tasks(settings, store)
    return [
        _subject(few(task, study), settings, store, seed)
        for task in tasks
        for seed in (study.seeds[:1] if task.fold else study.seeds)
    ]


def few(task: text.Task, study: EvidenceStudy) -> text.Task:
    """Return a task with as many held-out and test questions as there are of images."""
    return replace(
        task,
        held_out=task.held_out.first(study.held_out),
        test=task.test.first(study.test),
        beyond=task.beyond[: study.test],
    )


def _subject(task: text.Task, settings: text.TextStudy, store: Store, seed: int) -> Subject:
    left_out = task.fold or "all intents"
    trained = (text.ENCODER, text.TWO, settings.hidden, settings.epochs, left_out)

    def build() -> nn.Module:
        def make(work: Work) -> Content:
            return Content(text.trained(settings, text.TWO, task, seed, work).state_dict())

        network = text.build(settings, text.TWO, task.classes)
        stage = Stage(f"train {TEXT} {left_out}", trained, seed)
        network.load_state_dict(store.make(stage, make).load())
        return network

    unknown = f"without {task.fold}" if task.fold else "out-of-scope questions"
    parts = {TRAIN: task.train, HELD_OUT: task.held_out}
    beyond = Labelled(task.beyond, torch.full((len(task.beyond),), UNKNOWN))

    def record(part: str) -> Recorded:
        data = beyond if part == unknown else parts.get(part, task.test)
        named = f"{TEXT} {left_out} {part} seed {seed}"
        found = recorded(named, build, Source.of(data), (trained, seed), store)
        return with_unknown(record(clean), found) if part == unknown else found

    clean = f"{CLEAN}, {left_out}"
    shifts = {clean: CLEAN, unknown: task.experiment}
    return Subject(f"{TEXT} {left_out}", TEXT, seed, shifts, record)
