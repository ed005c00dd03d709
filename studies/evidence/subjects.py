"""What the study looks at: a trained network with its data and their shifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from studies.evidence.recorded import Recorded
from studies.store.record import digest

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
        shifts: shift -> its group. The first is in distribution, and its group is `CLEAN`.
        record: returns what the network makes of `TRAIN`, `HELD_OUT` or a shift. Inputs without a
            class are labelled `UNKNOWN`.
        members: other networks of its ensemble.
        bins: of the ECE.
    """

    name: str
    network: str
    seed: int
    shifts: Mapping[str, str]
    record: Callable[[str], Recorded]
    members: tuple[Subject, ...] = ()
    bins: int = 20

    @property
    def clean(self) -> str:
        """The name of the shift that is none."""
        return next(iter(self.shifts))

    def checksums(self) -> list[str]:
        """Return the SHA-256 of everything that was recorded, part by part."""
        return [_checksum(self.record(part)) for part in (TRAIN, HELD_OUT, *self.shifts)]


def _checksum(found: Recorded) -> str:
    tensors = (found.labels, found.logits, *found.places.values())
    return digest(*(tensor.contiguous().numpy().data.cast("B") for tensor in tensors))


def with_unknown(known: Recorded, unknown: Recorded) -> Recorded:
    """Return inputs of known classes, followed by others of none."""
    both = {name: torch.cat([own, unknown.places[name]]) for name, own in known.places.items()}
    labels = torch.full_like(unknown.labels, UNKNOWN)
    logits = torch.cat([known.logits, unknown.logits])
    return Recorded(torch.cat([known.labels, labels]), logits, both)
