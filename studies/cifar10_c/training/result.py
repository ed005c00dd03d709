"""What training gives: the last weights of SGD, and SWAG where weights were collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from acnml import Swag
from acnml._util.params import Params
from studies.cifar10_c.training.state import UPDATES, restore_swag, swag_tensors
from studies.store import Artefact, Content
from studies.training.state import below

SGD, STATISTICS = "sgd/", "statistics/"


@final
@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network.

    Attributes:
        sgd: parameters and buffers after the last epoch.
        swag: collected weights; `diagonal()` and `low_rank()` are its posteriors. None where none
            were collected.
        statistics: of batch norm at SWAG's mean.
        facts: losses and accuracies of all epochs while they were trained.
    """

    sgd: Params
    swag: Swag | None
    statistics: Params
    facts: Mapping[str, Any]

    @property
    def swa(self) -> Params:
        """The averaged weights with their batch-norm statistics, for `classifier.at`."""
        if self.swag is None:
            raise ValueError("no weights were collected in this training: there is no average")
        return {**self.swag.mean, **self.statistics}

    def content(self) -> Content:
        """Return all of it, to be kept."""
        return Content(
            {
                **{f"{SGD}{name}": tensor for name, tensor in self.sgd.items()},
                **{f"{STATISTICS}{name}": tensor for name, tensor in self.statistics.items()},
                **(swag_tensors(self.swag) if self.swag else {}),
            },
            self.facts,
        )


def load_trained(artefact: Artefact) -> Trained:
    """Read what `Trained.content` has kept."""
    tensors = artefact.load()
    return Trained(below(SGD, tensors), _swag(tensors), below(STATISTICS, tensors), artefact.facts)


def _swag(tensors: Params) -> Swag | None:
    if UPDATES not in tensors:
        return None
    swag = Swag(rank=max(2, int(tensors[UPDATES])))  # room for all deviations there can be
    restore_swag(swag, tensors)
    return swag
