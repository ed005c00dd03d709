"""A stage of a study, described before it is done: by what its result depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from acnml.experiments.pipeline.plain import canonical, digest

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
