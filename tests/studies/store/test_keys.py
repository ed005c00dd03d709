"""Keys of stages: equal for equal settings, and only for those."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from studies.store import Stage
from studies.store.record import canonical

from .parts import Linear


@dataclass(frozen=True)
class Square:
    slope: float = 1.0


BASE = Stage("fit", Linear(), seed=0, needs=(Stage("train", Linear()),))


@pytest.mark.parametrize(
    "same",
    [
        Stage("fit", Linear(1), seed=0, needs=(Stage("train", Linear()),)),
        Stage("fit", {"Linear": {"slope": 1}}, needs=(Stage("train", Linear()),)),
    ],
)
def test_equal_settings_have_equal_keys(same):
    assert (same.key, same.label) == (BASE.key, BASE.label)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(BASE, name="fit again"),
        dataclasses.replace(BASE, settings=Linear(1.5)),
        dataclasses.replace(BASE, settings=Square()),
        dataclasses.replace(BASE, seed=1),
        dataclasses.replace(BASE, version=2),
        dataclasses.replace(BASE, needs=()),
        dataclasses.replace(BASE, needs=(Stage("train", Linear(2)),)),
        dataclasses.replace(BASE, needs=(Stage("train", Linear(), version=2),)),
        dataclasses.replace(BASE, needs=BASE.needs * 2),
    ],
)
def test_whatever_decides_a_result_changes_its_key(other):
    assert other.key != BASE.key
    assert other.label != BASE.label


def test_keys_stay_what_they_are():
    """Written down once: a change would make every artefact that people have out of date."""
    expected = '["fit",{"Linear":{"slope":1}},0,1,["x"]]'
    assert canonical(["fit", Linear(), 0, 1, ("x",)]) == expected
