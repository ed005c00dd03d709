"""Predictions in tranches: a run for more images goes on from one for fewer."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from acnml._util.params import Params
from studies.store import Artefact

ENDS = (10, 100, 250, 1000)  # where one tranche of images ends and the next begins


def tranches(images: int) -> list[slice]:
    """Cut the first so many images at the same places, however many there are.

    >>> tranches(120)
    [slice(0, 10, None), slice(10, 100, None), slice(100, 120, None)]
    """
    bounds = [0, *(end for end in ENDS if end < images), images]
    return [slice(*pair) for pair in pairwise(bounds)]


class Predictions(NamedTuple):
    """Saved predictions of consecutive images."""

    parts: tuple[Artefact, ...]

    def load(self) -> Params:
        """Read all of them."""
        loaded = [part.load() for part in self.parts]
        return {name: torch.cat([each[name] for each in loaded]) for name in loaded[0]}

    @property
    def seconds_per_input(self) -> float:
        """What a prediction has taken."""
        inputs = sum(part.facts["inputs"] for part in self.parts)
        return sum(part.seconds for part in self.parts) / inputs
