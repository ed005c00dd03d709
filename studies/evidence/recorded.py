"""What a network makes of its data: computed once, in resumable artefacts.

All methods of the study are functions of logits, and of features at several places of the network:
the pooled ends of its stages, and the last layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acnml import Classifier, last_linear
from acnml.features import Place, direction_and_length, find_places
from studies.data import Labelled
from studies.engine.study import checksum
from studies.store import Stage, Store

BLOCK = 250
LOGITS = "logits"


class Recorded(NamedTuple):
    """A split or a shift, as a network sees it."""

    labels: Tensor  # (N,)
    logits: Tensor  # (N, K)
    places: Mapping[str, Tensor]  # place -> features (N, q); the last layer's input comes last

    @property
    def features(self) -> Tensor:
        """What a score sees of all places (N, p): directions and lengths, as for `calibrate`."""
        return torch.cat([direction_and_length(own) for own in self.places.values()], dim=1)

    @property
    def last(self) -> Tensor:
        """The last layer's input (N, d)."""
        return list(self.places.values())[-1]


def from_tensors(labels: Tensor, found: Mapping[str, Tensor]) -> Recorded:
    """Return what `watched` recorded; places are stored with their numbers."""
    places = {name: found[name] for name in sorted(found) if name != LOGITS}
    return Recorded(labels, found[LOGITS], places)


def watched(network: nn.Module, places: Sequence[Place]) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from a batch to its logits and the pooled features of all places."""
    kept: dict[str, Tensor] = {}
    modules = dict(network.named_modules())

    def keep(name: str, place: Place) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            kept[name] = place.pooled(args, output).clone()

        return hook

    for number, place in enumerate(places):
        modules[place.module].register_forward_hook(keep(f"{number} {place}", place))

    @torch.no_grad()
    def run(batch: Tensor) -> dict[str, Tensor]:
        return {LOGITS: network(batch).clone(), **kept}

    return run


def channels_last(network: nn.Module) -> nn.Module:
    """Bring weights of convolutions to the memory layout that is fastest on a CPU."""
    for parameter in network.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return network


class Source(NamedTuple):
    """Data that a network reads block by block."""

    labels: Tensor  # (N,)
    checksum: str  # of the data, or of all they are made from
    read: Callable[[slice], Tensor]  # rows -> inputs of the network

    @staticmethod
    def of(data: Labelled, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Source:
        """Return data that are in memory; `prepare` makes them inputs of the network."""
        return Source(data.labels, checksum(data), lambda rows: prepare(data.inputs[rows]))


def recorded(
    name: str, build: Callable[[], nn.Module], source: Source, decided: Any, store: Store
) -> Recorded:
    """Return what a network makes of data, at the places of `calibrate` and before the last layer.

    Args:
        name: of the network and the data, for people.
        build: returns the trained network; called if anything is missing.
        source: the data.
        decided: what decides the network, such as the checksum of its weights.
        store: where it is kept.
    """
    run: list[Callable[[Tensor], dict[str, Tensor]]] = []

    def compute(rows: slice) -> dict[str, Tensor]:
        x = source.read(rows)
        if not run:
            with torch.enable_grad():  # it may have to be trained first
                network = channels_last(build().eval())
            last = last_linear(network)
            head = next(n for n, module in network.named_modules() if module is last)
            places = [p for p in find_places(Classifier(network), x[:8]) if p.module != head]
            run.append(watched(network, (*places, Place(head, is_input=True))))
        return run[0](x)

    stage = Stage(f"recorded {name}", (decided, source.checksum), version=2)
    found = store.predict(stage, len(source.labels), BLOCK, compute)
    return from_tensors(source.labels, found.load())
