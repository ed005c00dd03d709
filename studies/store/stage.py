"""A stage of a study, described by what its result depends on, and its finished result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import acnml
from acnml._util.params import Params
from studies.store.record import Header, canonical, digest, read_record

SHORT = 12  # digits of a key that tell the stages of a study apart


@final
@dataclass(frozen=True)
class Stage:
    """What one artefact is, said by all that decides it.

    Two stages with the same key are the same; when a setting changes, the keys of exactly those
    stages change that have it among their settings or need a stage that has.

    Args:
        name: says to people what it is, such as "predict acnml 60°".
        settings: plain data (a frozen dataclass, say): all that the result depends on and that no
            needed stage has. What is read from outside stands here as its checksum.
        seed: of everything random in it.
        version: of the code that does it; raise it when a change of the code changes the result.
        needs: the stages whose artefacts it reads.
    """

    name: str
    settings: Any = None
    seed: int = 0
    version: int = 1
    needs: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        canonical(self.settings, f"the settings of stage {self.name!r}")

    @cached_property
    def key(self) -> str:
        """The SHA-256 of all that decides the result."""
        needs = [stage.key for stage in self.needs]
        return digest(canonical([self.name, self.settings, self.seed, self.version, needs]))

    @property
    def title(self) -> str:
        """How people are told of it."""
        return f"{self.name}, seed {self.seed}"

    @property
    def label(self) -> str:
        """The name of its folder: readable, and different for every key."""
        words = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")
        return f"{words}-seed{self.seed}-{self.key[:SHORT]}"


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

    def load_saved(self) -> Any:
        """Read the posterior or curvature that was given to `Content.of_saved`."""
        read_record(self.path)  # checks it
        return acnml.load(self.path)
