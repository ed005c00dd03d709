"""What a network makes of its data: computed once, in resumable artefacts.

All methods of the study are functions of the last layer's inputs, the logits and the pooled
features of the network's stages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml import Classifier, last_linear
from acnml.features import Taps, find_places
from studies.engine.study import checksum
from studies.evidence.subjects import Subject
from studies.store import Stage, Store

BLOCK = 250


class Recorded(NamedTuple):
    """The data of a split or a shift, as the network sees them."""

    inputs: Tensor  # of the last layer (N, d)
    logits: Tensor  # (N, K)
    taps: Tensor  # pooled features of all places (N, p)
    labels: Tensor  # (N,)


def recorded(subject: Subject, part: str, store: Store) -> Recorded:
    """Return the training data, the held-out data or a shift of a network."""
    data = subject.data(part)
    decided = (subject.decided, checksum(data))
    stage = Stage(f"recorded {subject.name} {part}", decided, subject.seed)
    network = subject.trained
    layer, classifier = last_linear(network), Classifier(network)
    name = next(n for n, module in network.named_modules() if module is layer)
    places = find_places(classifier, subject.prepare(data.inputs[:8]))

    @torch.no_grad()
    def compute(rows: slice) -> dict[str, Tensor]:
        kept: list[Tensor] = []

        def keep(_: object, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            kept.append(args[0].clone())
            return output

        taps = Taps(classifier.hooked({name: keep}), places)
        logits = taps.classifier.logits(subject.prepare(data.inputs[rows]))
        features = taps.features(len(logits))
        return {"inputs": kept[0], "logits": logits.clone(), "taps": features.clone()}

    found = store.predict(stage, len(data.labels), BLOCK, compute).load()
    return Recorded(found["inputs"], found["logits"], found["taps"], data.labels)
