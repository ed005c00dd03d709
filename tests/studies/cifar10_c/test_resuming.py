"""Runs that are killed or changed: nothing is done twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from stores import KilledError, made, store_in
from studies.cifar10_c import methods
from studies.cifar10_c.study import build
from studies.engine import predict
from studies.engine.predict import predict_shift
from studies.engine.predictors import outputs
from studies.engine.run import phases, run
from studies.engine.workshop import Making, Workshop


def hashes(out):
    """The content of every artefact, by its folder."""
    headers = (out / "artefacts").glob("*/header.json")
    return {path.parent.name: json.loads(path.read_text())["content_hash"] for path in headers}


def test_a_killed_run_goes_on_where_it_was(finished, tiny, study, data, tmp_path, monkeypatch):
    """Killed at some prediction and started again: nothing is done twice, all is the same."""
    some = [phase for phase in phases(study) if phase.title == "corruptions, cheap methods"]
    part = study.replaced(phases=tuple(some))
    calls = []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 12:
            raise KilledError
        return outputs(*arguments)

    monkeypatch.setattr(predict, "outputs", dies)
    with pytest.raises(KilledError):
        run(part, data, Making(store_in(tmp_path, tiny)))
    half = hashes(tmp_path)
    run(part, data, Making(store_in(tmp_path, tiny)))
    assert len(made(tmp_path)) == len(set(made(tmp_path)))
    assert half.items() < hashes(tmp_path).items() < hashes(finished[0]).items()


@pytest.mark.parametrize("change", [{"samples": 3}, {"batch_norm_images": 7}])
def test_a_changed_setting_redoes_only_what_depends_on_it(finished, data, tiny, tmp_path, change):
    """The number of samples, and the images for batch norm, decide on samples and nothing else."""
    out = shutil.copytree(finished[0], tmp_path / "out")
    before = len(made(out))
    changed = replace(tiny, **change)
    run(build(changed), data, Making(store_in(out, changed)))
    again = made(out)[before:]
    for what in ("predict BMA", "renew batch norm"):
        assert any(name.startswith(what) for name in again)
    assert all("BMA" in name or name.startswith("renew batch norm") for name in again)


def predicted(described, images, out):
    makers = Workshop(build(described), images, Making(store_in(out, described)), 0)
    return predict_shift(methods.BMA_SWAG_D, "contrast 5", makers).load()["log_probs"]
