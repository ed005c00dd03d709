"""The finished result of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import acnml
from acnml._util.params import Params
from acnml.experiments.pipeline.record import Header, read_record
from acnml.experiments.pipeline.stage import Stage


@final
@dataclass(frozen=True)
class Artefact:
    """A result on disk; its header is at hand, its tensors are read when asked for.

    Args:
        stage: what it is.
        path: its safetensors file.
        header: study, stage, settings, seed, versions, hardware, seconds, hashes and facts.
    """

    stage: Stage
    path: Path
    header: Header

    @property
    def facts(self) -> Header:
        """What the stage found beside its tensors."""
        return self.header["facts"]

    @property
    def seconds(self) -> float:
        """How long the work in it took, in all runs together."""
        return float(self.header["seconds"])

    @property
    def seconds_per_input(self) -> float:
        """How long one input took, where the artefact is predictions."""
        return self.seconds / int(self.facts["inputs"])

    def load(self) -> Params:
        """Read the tensors, checking them once more."""
        return dict(read_record(self.path).content.tensors)

    def load_posterior(self) -> acnml.Posterior:
        """Read the posterior that was given to `Content.of_posterior`."""
        read_record(self.path)  # checks it
        return acnml.load(self.path)
