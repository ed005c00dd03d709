"""Verdicts on made-up results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies.cifar10_c import methods
from studies.engine.choose import SweepPoint
from studies.engine.claims import matched_gaps, verdicts
from studies.engine.method import Method
from studies.engine.results import Row

from .tiny import judged


def made_up(results, eces, clean=None, severities=(5, 4)):
    """Results in which methods have these ECEs at all corruptions, and clean scores of 0.5."""
    n, rows = results.data.count(results.study.settings.images.network_wide), []
    for method, ece in eces.items():
        accuracy, nll = (clean or {}).get(method, (0.5, 0.5))
        for shift in ("clean", *(f"contrast {s}" for s in severities)):
            row = Row(method, 0, shift, n, accuracy, nll, 0.1, ece)
            rows += [row, row._replace(n=12)]
    return replace(results, rows=tuple(rows), sweep=(), agreements=())


SWAG_D = (methods.MAP_SWA, methods.BMA_SWAG_D, methods.ACNML_SWAG_D_PAPERS)
LOWER = "with SWAG-D has a lower ECE"


@pytest.mark.parametrize(
    ("eces", "holds"),
    [((0.3, 0.2, 0.1), True), ((0.3, 0.1, 0.2), False), ((0.1, 0.3, 0.2), False)],
)
def test_the_ece_under_corruption_is_judged_against_both(finished, eces, holds):
    results = made_up(finished[1], dict(zip(SWAG_D, eces, strict=True)))
    assert judged(results, LOWER) == [holds]
    assert judged(results, "with KFAC-Laplace has a lower ECE") == [None]
    (text,) = (v.measured for v in verdicts(results) if LOWER in v.claim)
    wins = [
        f"{label} for {n} / {n} of 1"
        for label, n in zip(
            ("SWA", "SWAG-D"), [int(eces[2] < other) for other in eces[:2]], strict=True
        )
    ]
    assert all(f"lower than {each}" in text for each in wins)
    half = made_up(finished[1], dict(zip(SWAG_D, eces, strict=True)), severities=(5,))
    assert judged(half, LOWER) == [None]


@pytest.mark.parametrize(
    ("accuracy", "nll", "holds"),
    [(0.9, 0.3, [True, True]), (0.894, 0.3, [False, True]), (0.9, 0.36, [True, False])],
)
def test_clean_scores_are_judged_against_the_better(finished, accuracy, nll, holds):
    clean = dict(zip(SWAG_D, ((0.9, 0.5), (0.8, 0.3), (accuracy, nll)), strict=True))
    results = made_up(finished[1], dict.fromkeys(SWAG_D, 0.1), clean)
    assert judged(results, "In distribution, ACNML with SWAG-D") == holds


def test_families_are_compared_on_their_cautious_branches(finished):
    """A temperature passes each NLL twice; only the cautious passage counts."""

    def points(method: Method, path):
        return [
            SweepPoint(method.family, method.at(v), n, {"contrast 5": e}, {"contrast 5": 1.0})
            for v, n, e in path
        ]

    # NLL falls from T = 1 to T = 2 and rises again; at NLL 0.15 the cautious ECE is 0.35.
    tempered = points(methods.TEMPERED, [(4, 0.2, 0.3), (2, 0.1, 0.4), (1, 0.15, 0.9)])
    head = points(methods.ACNML_HEAD, [(1, 0.15, 0.3), (100, 0.1, 0.4)])
    swept = replace(finished[1], sweep=(*tempered, *head))
    gaps = matched_gaps(swept, methods.ACNML_HEAD, methods.TEMPERED, average=True)
    assert gaps == {"": pytest.approx([-0.05, 0.0])}
    assert judged(swept, "ACNML, last layer does more") == [True]
    assert matched_gaps(swept, methods.ACNML_KFAC, methods.TEMPERED) == {}
