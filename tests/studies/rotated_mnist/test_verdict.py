"""Verdicts: they wait for all seeds, and compare families where these are cautious."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies.engine.claims import verdicts
from studies.rotated_mnist import methods


@pytest.mark.parametrize("best", [methods.ACNML_HEADS, methods.TEMPERED_ENSEMBLE])
def test_a_claim_is_about_a_method_that_it_names(finished, best):
    """Whichever method is best on rotated test images: the claim is about the ensemble of ACNML."""
    _, results = finished
    rows = [row._replace(ece=0.1 if row.method.name == best.name else 0.2) for row in results.rows]
    judged = verdicts(replace(results, rows=tuple(rows)))
    (found,) = [v for v in judged if "is better calibrated than all others" in v.claim]
    assert found.holds is (best == methods.ACNML_HEADS)
