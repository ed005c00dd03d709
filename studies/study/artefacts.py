"""Where a study's stages become artefacts: made when they are missing, or only looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, TypeVar, final

from studies.store import Artefact, Stage, Store
from studies.store.work import Compute, Make

T = TypeVar("T")
Prepare: TypeAlias = Callable[[], Compute]  # loads what is heavy, before the clock runs


class Artefacts(Protocol):
    """Stage -> artefact."""

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        ...

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        ...


@final
class Making:
    """Makes what is missing.

    Args:
        store: where artefacts are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        return self._store.make(stage, function)

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        if (found := self._store.find(stage)) is not None:
            return found
        return self._store.predict(stage, inputs, block, prepare())


@final
class Once:
    """Looks at the disk once for every stage that is done in one go.

    Args:
        artefacts: where they come from.
    """

    def __init__(self, artefacts: Artefacts) -> None:
        self._artefacts = artefacts
        self._made: dict[str, Artefact] = {}

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        if stage.key not in self._made:
            self._made[stage.key] = self._artefacts.make(stage, function)
        return self._made[stage.key]

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        return self._artefacts.predict(stage, inputs, block, prepare)


@final
class MissingError(Exception):
    """Something that a report would show is not there yet."""


@final
class Finished:
    """Makes nothing, for reports: what is missing is an error that names it.

    Args:
        store: where artefacts are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        return self._find(stage)

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        return self._find(stage)

    def _find(self, stage: Stage) -> Artefact:
        found = self._store.find(stage)
        if found is None:
            raise MissingError(stage.title)
        return found


@final
class Gathering:
    """Takes what there is, and keeps the names of what is missing."""

    def __init__(self) -> None:
        self.missing: dict[str, None] = {}  # in order, once each

    def each(self, find: Callable[..., T], arguments: Iterable[tuple[Any, ...]]) -> tuple[T, ...]:
        """Call the function with each of the arguments, and leave out what is missing."""
        found = []
        for some in arguments:
            try:
                found.append(find(*some))
            except MissingError as error:
                self.missing[str(error)] = None
        return tuple(found)
