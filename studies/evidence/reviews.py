"""Reviews of films whose writers changed a few words, so that the verdict is the opposite.

A head on a frozen encoder is trained on reviews as they were written (Kaushik, Hovy & Lipton 2020).
The shift is the changed ones: the same films and words, and another verdict.
"""

from __future__ import annotations

import csv
import math
from functools import cache

import torch
from torch import Tensor, nn

from studies import text
from studies.data import Labelled, split
from studies.data.folder import DataError, data_folder
from studies.engine.study import checksum
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import REVIEWS, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject
from studies.store import Content, Stage, Store, Work

FOLDER = "counterfactual"
SOURCE = "https://github.com/acmi-lab/counterfactually-augmented-data (its folder sentiment)"
CHANGED = "changed reviews"
BLOCK, BATCH = 256, 16


def reviews(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return heads with two layers, of all seeds."""
    # The development set of 245 is too small for choosing: a part of the training set joins it.
    whole = _embedded("orig", "train", store)
    train, more = split(whole, [len(whole.labels) - 400, 400], study.seed)
    few = _embedded("orig", "dev", store)
    held_out = Labelled(*(torch.cat(pair) for pair in zip(few, more, strict=True)))
    data = {TRAIN: train, HELD_OUT: held_out, CLEAN: _embedded("orig", "test", store)}
    changed = {CHANGED: _embedded("new", "test", store)}
    return [_subject({**data, **changed}, seed, store) for seed in study.seeds]


def _subject(data: dict[str, Labelled], seed: int, store: Store) -> Subject:
    settings = text.TextStudy()
    task = text.Task(REVIEWS, "", data[TRAIN], data[HELD_OUT], data[CLEAN], data[CLEAN].inputs, 2)
    decided = (text.ENCODER, text.TWO, settings.hidden, settings.epochs, checksum(data[TRAIN]))

    def build() -> nn.Module:
        def make(work: Work) -> Content:
            return Content(text.trained(settings, text.TWO, task, seed, work).state_dict())

        network = text.build(settings, text.TWO, 2)
        network.load_state_dict(store.make(Stage(f"train {REVIEWS}", decided, seed), make).load())
        return network

    def record(part: str) -> Recorded:
        named = f"{REVIEWS} {part} seed {seed}"
        return recorded(named, build, Source.of(data[part]), (decided, seed), store)

    return Subject(REVIEWS, REVIEWS, seed, {CLEAN: CLEAN, CHANGED: CHANGED}, record)


def _embedded(kind: str, part: str, store: Store) -> Labelled:
    """Return the encoder's vectors of reviews, as an artefact; their mean square is 1."""
    path = data_folder() / FOLDER / kind / f"{part}.tsv"
    if not path.is_file():
        raise DataError(f"{path} is missing: take it from {SOURCE}")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    texts = [row["Text"] for row in rows]
    labels = torch.tensor([row["Sentiment"] == "Positive" for row in rows]).long()
    encoder = cache(text.load_encoder)

    def compute(some: slice) -> dict[str, Tensor]:
        own = texts[some]
        batches = [own[start : start + BATCH] for start in range(0, len(own), BATCH)]
        return {"vectors": torch.cat([encoder()(batch) for batch in batches])}

    stage = Stage(f"embeddings of reviews {kind} {part}", (text.ENCODER, texts))
    found = store.predict(stage, len(texts), BLOCK, compute).load()["vectors"]
    return Labelled(found * math.sqrt(text.WIDTH), labels)
