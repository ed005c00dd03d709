"""What the last layer of a network for CIFAR-10 receives, recorded once for every set of images."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from acnml import last_linear
from studies.data import Labelled
from studies.engine.study import checksum
from studies.models.weights import Weights
from studies.store import Stage, Store

BLOCK, BATCH = 1000, 100  # images per artefact part, and per pass

# The prior precision of a last layer's posterior, as a share of the curvature's mean eigenvalue: so
# small that the data decide.
RELATIVE_PRIOR = 1e-2


def features(name: str, weights: Weights, images: Labelled, store: Store) -> Labelled:
    """Return the inputs (n, d) of the last layer, with the labels.

    Args:
        name: of the images, for people.
        weights: the network.
        images: as they are stored, in bytes.
        store: where they are kept.
    """
    received: list[Tensor] = []

    @cache
    def network() -> nn.Module:
        built = weights.build()
        last_linear(built).register_forward_pre_hook(lambda _, args: received.append(args[0]))
        return built

    @torch.no_grad()
    def compute(rows: slice) -> dict[str, Tensor]:
        received.clear()
        for some in images.inputs[rows].split(BATCH):
            network()(weights.prepare(some))
        return {"features": torch.cat(received)}

    stage = Stage(f"features {name}", (weights.model, weights.checksum, checksum(images)))
    found = store.predict(stage, len(images.labels), BLOCK, compute).load()
    return Labelled(found["features"], images.labels)
