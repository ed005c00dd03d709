"""Runs that are killed or changed: nothing is done twice."""

from __future__ import annotations

import shutil

import pytest

from stores import KilledError, made, store_in
from studies.engine.predictors import outputs
from studies.engine.report import write_report
from studies.engine.results import collect
from studies.engine.run import run
from studies.engine.workshop import Finished, Making
from studies.rotated_mnist.study import build
from studies.settings import override

from .tiny import TINY


def test_a_changed_setting_redoes_only_what_depends_on_it(finished, data, tmp_path):
    """The samples decide what is sampled; the ensemble's size decides the ensembles."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    before = len(made(out))
    changed = override(TINY, ["members=1", "swag.learning_rate=0.01"])
    run(build(changed), data, Making(store_in(out, changed)))
    again = made(out)[before:]
    assert again
    assert all("ensemble" in name or "SWAG" in name for name in again), again


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
