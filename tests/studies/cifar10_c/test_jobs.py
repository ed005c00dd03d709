"""The study's methods, and the order in which they are run."""

from __future__ import annotations

import pytest

from studies.cifar10_c import KIND, methods
from studies.cifar10_c.settings import PRESETS
from studies.engine.predictors import predictor
from studies.engine.run import phases
from studies.engine.study import FRONTIER, HELD_OUT


def test_methods_have_names_of_their_own():
    everything = (*methods.CHEAP, *methods.NETWORK_WIDE, *methods.COSTLY)
    assert len({method.name for method in everything}) == len(everything)
    with pytest.raises(ValueError, match="choose the prior precision of ACNML KFAC last layer"):
        predictor(methods.ACNML_HEAD, None)


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
