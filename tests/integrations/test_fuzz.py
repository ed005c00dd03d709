"""A slice of the standing fuzz: the first seeds of every kind, and what the fuzz itself notices."""

from __future__ import annotations

import pytest
import torch

import acnml

pytest.importorskip("pyarrow", reason="needs the extra `predict`, whose files are tried, too")

from fuzz.cases import KINDS, Case, cases, run
from fuzz.outcome import Outcome, WrongError, refused_or, require

# Cases that were once wrong.
FOUND = {"scored": [588]}
# Seeds per kind: some seconds each. `make fuzz` runs thousands.
SLICE = {"answers": 60, "family": 60, "files": 200}
SLICE |= {"folders": 40, "inputs": 60, "neighbours": 40, "scored": 30}


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_equal_refused_or_flagged(kind):
    seeds = [*range(SLICE[kind]), *FOUND.get(kind, [])]
    results = {seed: run(Case(kind, seed)) for seed in seeds}
    wrong = [
        f"python -m fuzz --kind {kind} --seed {seed}: {result.text}"
        for seed, result in results.items()
        if result.end == "WRONG"
    ]
    assert not wrong, "\n".join(wrong)
    ends = {result.end for result in results.values()}
    assert "equal" in ends
    assert len(ends) > 1  # it also tries what cannot be answered


def test_a_case_is_the_same_whenever_it_is_run():
    for kind in KINDS:
        before = torch.get_rng_state()
        first, again = (run(Case(kind, 3)) for _ in range(2))
        assert first == again
        assert torch.equal(torch.get_rng_state(), before)


def test_the_kinds_have_seeds_of_their_own():
    some = list(cases(20, first=5, kinds=list(KINDS)))
    assert len(set(some)) == 20
    assert {case.kind for case in some} == set(KINDS)
    assert min(case.seed for case in some) == 5


def raw() -> Outcome:
    return torch.ones(2) @ torch.ones(3)


def silent() -> Outcome:
    require(torch.tensor(float("nan")) <= 1, "NaN passes")
    return Outcome.EQUAL


@pytest.mark.parametrize("result", [raw, silent, lambda: {}["x"], lambda: int("x")])
def test_accidents_are_no_refusals(result):
    with pytest.raises(WrongError):
        refused_or(result)


def test_a_refusal_is_one():
    assert refused_or(lambda: acnml.Linearised(step_size=-1.0)) is Outcome.REFUSED
