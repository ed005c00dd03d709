"""Recipes: where the weights come from, what tells two trainings apart, and the command."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from stores import store_in
from studies.cifar10_c import methods
from studies.cifar10_c.study import build
from studies.data import cifar10
from studies.engine.command import train_network
from studies.engine.workshop import Finished, Workshop
from studies.training import load_trained

from .tiny import DESCRIPTIONS, bytes_of

SEED = 3


def test_the_command_trains_from_given_weights(tiny, tiny_world, tmp_path):
    """At a rate that moves nothing, all weights stay those that were given."""
    still = replace(tiny.schedule, learning_rate=1e-30, swa_learning_rate=1e-30)
    study = build(replace(tiny, schedule=still))
    train_network(study, methods.SWA, SEED, tmp_path)
    data = study.load(tmp_path)
    made = Workshop(study, data, Finished(store_in(tmp_path, tiny)), SEED).trained(methods.SWA)
    trained, given = load_trained(made), DESCRIPTIONS["tiny"].trained(tiny_world / "weights")
    assert trained.swag.updates == 2
    for name, parameter in given.named_parameters():
        for found in (trained.last[name], trained.swag.mean[name]):
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-20)


def key_of(settings, out, seed=SEED):
    study = build(settings)
    workshop = Workshop(study, study.load(out), Finished(store_in(out, settings)), seed)
    return workshop.training_stage(methods.SWA).key


def test_the_stage_tells_recipes_images_weights_and_seeds_apart(
    tiny, tiny_world, tmp_path, monkeypatch
):
    longer = replace(tiny, schedule=replace(tiny.schedule, epochs=4))
    keys = [
        key_of(tiny, tmp_path),
        key_of(longer, tmp_path),
        key_of(tiny, tmp_path, SEED + 1),
        key_of(replace(tiny, model="fresh"), tmp_path),
    ]
    assert key_of(tiny, tmp_path) == keys[0]
    with monkeypatch.context() as patch:
        patch.setattr(cifar10, "load", lambda split: bytes_of(59, 5))
        keys.append(key_of(tiny, tmp_path))
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    (tmp_path / "weights").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        key_of(tiny, tmp_path)
    other = DESCRIPTIONS["tiny"].untrained(seed=2).state_dict()
    save_file(other, tmp_path / "weights" / "tiny.safetensors")
    keys.append(key_of(tiny, tmp_path))
    assert len(set(keys)) == len(keys)
