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
    """The description of an artefact by everything that decides it.

    Two stages with the same key are the same. When a setting changes, exactly those keys change
    whose stages have it among their settings or need a stage that has it.

    Args:
        name: for people, such as "predict acnml 60°".
        settings: plain data, such as a frozen dataclass: everything that the result depends on and
            that no needed stage has. Outside data enter as their checksum.
        seed: of everything random in it.
        version: of its code; raise it when a change of the code changes the result.
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
        """The SHA-256 of everything that decides the result."""
        needs = [stage.key for stage in self.needs]
        return digest(canonical([self.name, self.settings, self.seed, self.version, needs]))

    @property
    def title(self) -> str:
        """The name and the seed, for people."""
        return f"{self.name}, seed {self.seed}"

    @property
    def label(self) -> str:
        """The name of its folder: readable, and different for every key."""
        words = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")
        return f"{words}-seed{self.seed}-{self.key[:SHORT]}"


@final
@dataclass(frozen=True)
class Artefact:
    """A result on disk; its header is loaded, its tensors are read on demand.

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
        """Plain data that the stage found."""
        return self.header["facts"]

    @property
    def seconds(self) -> float:
        """The time of the work in it, over all runs."""
        return float(self.header["seconds"])

    @property
    def seconds_per_input(self) -> float:
        """The time per input, if the artefact holds predictions."""
        return self.seconds / int(self.facts["inputs"])

    def load(self) -> Params:
        """Read and verify the tensors."""
        return dict(read_record(self.path).content.tensors)

    def load_saved(self) -> Any:
        """Read the posterior or curvature that was given to `Content.of_saved`."""
        read_record(self.path)  # checks it
        return acnml.load(self.path)
