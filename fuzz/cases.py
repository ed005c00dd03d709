"""The list of all kinds of cases, and how one is run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from acnml._util.torch_state import seeded
from fuzz.answers import answer
from fuzz.family import member_of_family
from fuzz.files import mutated_file
from fuzz.folders import listed_folder
from fuzz.inputs import odd_input
from fuzz.neighbours import neighbours
from fuzz.outcome import Outcome
from fuzz.scored import scored_folder

# Every kind of case: a function of a seed that says what it did and how it ended.
KINDS: dict[str, Callable[[int], tuple[str, Outcome]]] = {
    "answers": answer,
    "family": member_of_family,
    "files": mutated_file,
    "folders": listed_folder,
    "inputs": odd_input,
    "neighbours": neighbours,
    "scored": scored_folder,
}

# How many of eleven cases are of a kind.
SHARES = {"answers": 2, "family": 1, "files": 3, "folders": 1, "inputs": 1}
SHARES |= {"neighbours": 2, "scored": 1}


class Case(NamedTuple):
    """One case, which is the same whenever it is run."""

    kind: str
    seed: int


class Result(NamedTuple):
    """How a case ended: "equal", "refused", "flagged" or "WRONG", and what it was."""

    end: str
    text: str


def cases(number: int, first: int, kinds: list[str]) -> Iterator[Case]:
    """Yield cases of all kinds, each kind with its own seeds from `first` on."""
    pattern = [kind for kind in kinds for _ in range(SHARES[kind])]
    seeds = {kind: itertools.count(first) for kind in kinds}
    for kind in itertools.islice(itertools.cycle(pattern), number):
        yield Case(kind, next(seeds[kind]))


def run(case: Case) -> Result:
    """Run a case; every error, also of the fuzz itself, is a bad end."""
    try:
        with seeded(case.seed):
            text, outcome = KINDS[case.kind](case.seed)
    except Exception as error:
        return Result("WRONG", f"{type(error).__name__}: {error}"[:1000])
    return Result(outcome.value, text)
