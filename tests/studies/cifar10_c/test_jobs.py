"""The study's methods, and the order in which they are run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies.cifar10_c import KIND, methods
from studies.cifar10_c.settings import PRESETS
from studies.engine.run import phases
from studies.engine.study import FRONTIER, HELD_OUT
from studies.settings import SettingError


def test_the_order_of_work():
    described = KIND.build(PRESETS["cpu"])
    titles = [phase.title for phase in phases(described)]
    severities = [title for title in titles if title.startswith("severity")]
    assert severities == [f"severity {s}, all weights" for s in (5, 4, 3, 1, 2)]
    first = {HELD_OUT: 0, "clean": 1, "fog 1": 2, FRONTIER: 3}
    for where, place in first.items():
        assert any(job.where == where for job in phases(described)[place].jobs)
    jobs = [job for phase in phases(described) for job in phase.jobs]
    assert len(set(jobs)) == len(jobs)
    assert len(described.shifts) == 1 + 75 + 2


def test_a_study_can_have_few_grounds():
    """Only methods on them take part, beside SWA, and claims about others are not made."""
    few = replace(PRESETS["scratch"], grounds=(methods.ENSEMBLE, methods.SWAG_D))
    study = KIND.build(few)
    assert {method.posterior for method in study.methods} == {"SWA", "SWA ensemble", "SWAG-D"}
    assert {job.method.posterior for phase in phases(study) for job in phase.jobs} == {
        "SWA",
        "SWA ensemble",
        "SWAG-D",
    }
    assert study.claims
    assert not any("KFAC" in claim.text for claim in study.claims)
    assert all(set(pair) <= set(study.methods) for pair in study.agreements)
    with pytest.raises(SettingError, match="there is no laplace, only"):
        KIND.build(replace(few, grounds=("laplace",)))
