"""Recipes: where the weights come from, what tells two trainings apart, and the command."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from studies.cifar10_c.training import (
    PRESETS,
    Nobody,
    Processes,
    Recipe,
    prepare_task,
    train,
    training_stage,
)
from studies.cifar10_c.training.__main__ import main

from studies.data import cifar10
from studies.data.cifar10 import LabelledBytes
from studies.models import MODELS

from .runs import result_in
from .tiny import DATA, SEED, bytes_of


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A data folder with weights for ResNet-20, and a few images in the place of CIFAR-10."""
    folder = tmp_path / "data"
    (folder / "weights").mkdir(parents=True)
    network = MODELS["resnet20"].untrained(seed=1)
    save_file(network.state_dict(), folder / "weights" / "resnet20.safetensors")
    monkeypatch.setenv("ACNML_DATA", str(folder))
    monkeypatch.setattr(cifar10, "load", lambda split: DATA)
    return network


def test_the_command_trains_from_given_weights(given, tmp_path):
    settings = ["training.epochs=3", "training.learning_rate=1e-30"]
    main("resnet20", tmp_path, SEED, [*settings, "training.swa_learning_rate=1e-30"])
    tensors = result_in(tmp_path)
    assert int(tensors["swag/updates"]) == 2
    for name, parameter in given.named_parameters():
        for result in ("sgd", "swag/mean"):
            found = tensors[f"{result}/{name}"]
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-20)


def test_what_the_command_cannot_do_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="there is no network 'vgg17', only"):
        main("vgg17", tmp_path)
    with pytest.raises(SystemExit, match="there is no setting"):
        main("vgg16", tmp_path, 0, ["training.epoch=3"])


def test_the_stage_tells_recipes_images_weights_and_seeds_apart(given, tmp_path):
    recipe = PRESETS["cpu"]["resnet20"]
    longer = replace(recipe, training=replace(recipe.training, epochs=7))
    keys = [
        training_stage(recipe, DATA, SEED).key,
        training_stage(longer, DATA, SEED).key,
        training_stage(recipe, bytes_of(25), SEED).key,
        training_stage(recipe, DATA, SEED + 1).key,
        training_stage(replace(recipe, start="random"), DATA, SEED).key,
    ]
    assert training_stage(recipe, DATA, SEED).key == keys[0]
    path = tmp_path / "data" / "weights" / "resnet20.safetensors"
    save_file(MODELS["resnet20"].untrained(seed=2).state_dict(), path)
    keys.append(training_stage(recipe, DATA, SEED).key)
    assert len(set(keys)) == len(keys)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        training_stage(recipe, DATA, SEED)


def test_random_starts_come_from_the_seed():
    recipe = Recipe("resnet20")
    first, again, other = (prepare_task(recipe, DATA, seed).network for seed in (0, 0, 1))
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("resnet21"), "there is no network 'resnet21', only mlp"),
        (Recipe("vgg16", "given"), "no weights are given for 'vgg16'"),
    ],
)
def test_recipes_that_cannot_be_followed_are_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        prepare_task(recipe, DATA, SEED)


@pytest.mark.parametrize("recipe", PRESETS["paper"].values(), ids=lambda recipe: recipe.model)
def test_the_papers_networks_take_a_step_at_full_size(recipe):
    images = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    data = LabelledBytes(images.to(torch.uint8), torch.tensor([0, 9]))
    task = prepare_task(recipe, data, SEED)
    before = {name: p.detach().clone() for name, p in task.network.named_parameters()}
    step = replace(recipe.training, epochs=1, swa_start=1)
    trained = train(task, step, SEED, Processes(), Nobody())
    assert all(torch.isfinite(tensor).all() for tensor in trained.sgd.values())
    assert all(not torch.equal(trained.sgd[name], tensor) for name, tensor in before.items())
