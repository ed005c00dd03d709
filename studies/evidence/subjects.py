"""What the study looks at: a trained network with its data and their shifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from studies.data import Labelled

CLEAN, TRAIN, HELD_OUT = "clean", "train", "held out"
UNKNOWN = -1  # the label of inputs that belong to no class


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """A network with its data.

    Attributes:
        name: with the seed it names the artefacts.
        network: its name in the tables; several subjects may share it if their shifts differ.
        seed: of its training.
        build: returns the trained network.
        prepare: stored inputs -> inputs of the network.
        train: for posteriors and densities.
        held_out: for all choices.
        shifts: shift -> its group. The first is in distribution, and its group is `CLEAN`.
        load: returns the inputs of a shift. Those without a class are labelled `UNKNOWN`.
        decided: what decides the trained network and its shifted data: settings, checksums.
        methods: that are compared, as far as there is what they need.
        members: of its ensemble.
        dropout: returns a network that was trained with dropout.
        whole: whether all weights are solved for.
        bins: of the ECE.
    """

    name: str
    network: str
    seed: int
    build: Callable[[], nn.Module]
    prepare: Callable[[Tensor], Tensor]
    train: Labelled
    held_out: Labelled
    shifts: Mapping[str, str]
    load: Callable[[str], Labelled]
    decided: Any
    methods: tuple[str, ...]
    members: tuple[Subject, ...] = ()
    dropout: Callable[[], nn.Module] | None = None
    whole: bool = False
    bins: int = 20

    @cached_property
    def trained(self) -> nn.Module:
        """The trained network, in the memory layout that is fastest for convolutions."""
        with torch.enable_grad():  # it may have to be trained first
            network: nn.Module = self.build().eval()
        for parameter in network.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return network

    @cached_property
    def trained_with_dropout(self) -> nn.Module:
        """The network that was trained with dropout."""
        assert self.dropout is not None
        with torch.enable_grad():
            return self.dropout().eval()

    @property
    def clean(self) -> str:
        """The name of the shift that is none."""
        return next(iter(self.shifts))

    def data(self, part: str) -> Labelled:
        """Return the training or held-out inputs, or those of a shift."""
        return {TRAIN: lambda: self.train, HELD_OUT: lambda: self.held_out}.get(
            part, lambda: self.load(part)
        )()


def with_unknown(known: Labelled, unknown: Tensor) -> Labelled:
    """Return inputs of known classes, followed by others of none."""
    labels = torch.full((len(unknown),), UNKNOWN)
    return Labelled(torch.cat([known.inputs, unknown]), torch.cat([known.labels, labels]))
