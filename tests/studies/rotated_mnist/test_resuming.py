"""Runs that are killed or changed: nothing is done twice."""

from __future__ import annotations

import pytest

from stores import KilledError, store_in
from studies.engine.predictors import outputs
from studies.engine.report import write_report
from studies.engine.results import collect
from studies.engine.run import run
from studies.engine.workshop import Finished, Making

from .tiny import TINY


def test_a_killed_run_has_the_numbers_of_an_unbroken_one(
    finished, study, data, tmp_path, monkeypatch
):
    """Killed twice and started again: metrics.csv is the same, byte for byte."""
    out, results = finished
    write_report(results, out)
    calls = []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) in (40, 90):
            raise KilledError
        return outputs(*arguments)

    monkeypatch.setattr("studies.engine.predict.outputs", dies)
    store = store_in(tmp_path, TINY)
    for _ in range(2):
        with pytest.raises(KilledError):
            run(study, data, Making(store))
    run(study, data, Making(store))
    write_report(collect(study, data, Finished(store)), tmp_path)
    for name in ("metrics.csv", "frontier.csv"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()
