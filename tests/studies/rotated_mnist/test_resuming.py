"""Runs that are killed or changed: nothing is done twice."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from studies.rotated_mnist.predict import outputs, predict_shift
from studies.rotated_mnist.run import run
from studies.rotated_mnist.workshop import Workshop
from studies.study.artefacts import Finished, Making, MissingError

from stores import KilledError, made, store_in
from studies.rotated_mnist import methods
from studies.settings import override
from studies.store import Content, Work

from .tiny import TINY


def test_a_changed_setting_redoes_only_what_depends_on_it(finished, data, tmp_path):
    """The samples decide what is sampled; the ensemble's size decides the ensembles."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    before = len(made(out))
    changed = override(TINY, ["members=1", "swag.learning_rate=0.01"])
    run(changed, data, Making(store_in(out, changed)))
    again = made(out)[before:]
    assert again
    assert all("ensemble" in name or "SWAG" in name for name in again)


def test_training_goes_on_from_its_checkpoint(data, tmp_path, monkeypatch):
    """Killed in the second epoch and started again: the same network, bit for bit."""
    kept = Work.checkpoint
    whole = Workshop(TINY, data, Making(store_in(tmp_path / "a", TINY)), 0)

    def dies(work: Work, content: Content) -> None:
        kept(work, content)
        if content.facts["epochs"] == 1:
            raise KilledError

    store = store_in(tmp_path / "b", TINY)
    for train in (Workshop.network, Workshop.bayes_by_backprop):
        monkeypatch.setattr(Work, "checkpoint", dies)
        with pytest.raises(KilledError):
            train(Workshop(TINY, data, Making(store), 0))
        monkeypatch.undo()
        resumed = train(Workshop(TINY, data, Making(store), 0)).load()
        expected = train(whole).load()
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert (tmp_path / "b" / "run.log").read_text().count("resumed") == 2


def test_predictions_lose_one_block(data, tmp_path, monkeypatch):
    calls = []
    study = override(TINY, ["images.converged=12", "images.beside=1"])
    method = replace(methods.ACNML_SWAG, solver=methods.CONVERGED)  # in blocks of 10

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KilledError
        return outputs(*arguments)

    monkeypatch.setattr("studies.rotated_mnist.predict.outputs", dies)
    workshop = Workshop(study, data, Making(store_in(tmp_path, TINY)), 0)
    with pytest.raises(KilledError):
        predict_shift(method, "0°", workshop)
    artefact = predict_shift(method, "0°", workshop)
    assert [len(images) for _, images, _ in calls] == [10, 2, 2]
    assert artefact.load()["log_lik"].shape == (12, 10)
    assert artefact.load()["residual"].max() < 0.05


def test_missing_work_is_an_error_of_its_own(tmp_path, data):
    workshop = Workshop(TINY, data, Finished(store_in(tmp_path, TINY)), 0)
    with pytest.raises(MissingError, match="train network, seed 0"):
        predict_shift(methods.MAP, "0°", workshop)
