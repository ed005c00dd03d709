"""What saved predictions score: rows of metrics.csv, and points of reliability diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from acnml import metrics

Method = TypeVar("Method")  # every study has its own
PER_BIN = 5  # images of a bin from which an ECE says something


@final
@dataclass(frozen=True)
class Row(Generic[Method]):
    """How one method does on the first n images of one shift, for one seed."""

    method: Method
    seed: int
    shift: str
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float
    seconds_per_input: float


class Diagram(NamedTuple):
    """Points of a reliability diagram, over all seeds."""

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]


def diagram(seeds: Sequence[Tensor], labels: Tensor, bins: int) -> Diagram:
    """Return the diagram of log-probabilities (N, K), some for every seed."""
    found = metrics.reliability(torch.cat(list(seeds)), labels.repeat(len(seeds)), bins)
    return Diagram(tuple(found.confidence.tolist()), tuple(found.accuracy.tolist()))
