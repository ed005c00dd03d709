"""Verdicts: they wait for all seeds, and compare families where these are cautious."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies.engine.choose import SweepPoint
from studies.engine.claims import cautious_branch, matched_gaps, verdicts
from studies.engine.method import Method
from studies.rotated_mnist import methods


def test_verdicts_wait_for_all_seeds(finished):
    _, results = finished
    n = results.inputs([methods.MAP])
    assert results.mean(methods.MAP, "ece", ["90°"], n) is not None
    more = replace(results, study=results.study.replaced(seeds=(0, 1)))
    assert more.mean(methods.MAP, "ece", ["90°"], n) is None


def test_families_are_compared_on_their_cautious_branches(finished):
    """A temperature passes each NLL twice; only the cautious passage counts."""
    _, results = finished

    def points(method: Method, path: list[tuple[float, float, float]]) -> list[SweepPoint]:
        return [
            SweepPoint(method.family, method.at(v), n, {"90°": e}, {"90°": 1.0}) for v, n, e in path
        ]

    # NLL falls from T = 1 to T = 2 and rises again; at NLL 0.15 the cautious ECE is 0.35.
    tempered = points(methods.TEMPERED, [(4, 0.2, 0.3), (2, 0.1, 0.4), (1, 0.15, 0.9)])
    head = points(methods.ACNML_HEAD, [(1, 0.15, 0.3), (100, 0.1, 0.4)])
    swept = replace(results, sweep=(*tempered, *head))
    gaps = matched_gaps(swept, methods.ACNML_HEAD, methods.TEMPERED)
    assert gaps == {"90°": pytest.approx([0.3 - 0.35, 0.4 - 0.4])}
    same = matched_gaps(swept, methods.TEMPERED, methods.TEMPERED)
    assert same == {"90°": pytest.approx([0, 0])}
    assert cautious_branch([]) == []


@pytest.mark.parametrize("best", [methods.ACNML_HEADS, methods.TEMPERED_ENSEMBLE])
def test_a_claim_is_about_a_method_that_it_names(finished, best):
    """Whichever method is best on rotated test images: the claim is about the ensemble of ACNML."""
    _, results = finished
    rows = [row._replace(ece=0.1 if row.method.name == best.name else 0.2) for row in results.rows]
    judged = verdicts(replace(results, rows=tuple(rows)))
    (found,) = [v for v in judged if "is better calibrated than all others" in v.claim]
    assert found.holds is (best == methods.ACNML_HEADS)
