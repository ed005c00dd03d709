"""Schedules and presets are those of SWAG, and wrong settings are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from studies.cifar10_c.training import PRESETS, Training

from studies.models import MODELS

from .written_out import swag_rate


@pytest.mark.parametrize("recipe", [r for preset in PRESETS.values() for r in preset.values()])
def test_the_schedule_is_that_of_swag(recipe):
    t = recipe.training
    expected = [
        swag_rate(epoch, t.swa_start, t.learning_rate, t.swa_learning_rate)
        for epoch in range(t.epochs)
    ]
    assert [t.rate(epoch) for epoch in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    plain_sgd = t.without_averaging()
    expected = [
        swag_rate(epoch, t.epochs, t.learning_rate, 0.01 * t.learning_rate)
        for epoch in range(t.epochs)
    ]
    assert [plain_sgd.rate(e) for e in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    assert plain_sgd.collected == 0


def test_the_presets_are_what_swags_commands_say():
    paper = {name: recipe.training for name, recipe in PRESETS["paper"].items()}
    assert paper["vgg16"] == paper["vgg16_dropout"]
    assert paper["vgg16"] == Training(300, 161, 0.05, 0.01, 5e-4, 0.9, 128, 20)
    assert paper["wide_resnet28x10"] == Training(300, 161, 0.1, 0.05, 5e-4, 0.9, 128, 20)
    assert paper["vgg16"].collected == 139
    assert all(recipe.start == "random" for recipe in PRESETS["paper"].values())


def test_the_cpu_preset_starts_from_given_weights_at_a_constant_rate():
    for name, recipe in PRESETS["cpu"].items():
        t = recipe.training
        assert recipe.model == name
        assert recipe.start == "given"
        assert MODELS[name].weights is not None
        assert len({t.rate(epoch) for epoch in range(t.epochs)}) == 1
        assert t.collected >= 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be a positive"),
        ({"swa_start": 301}, "swa_start must be from 0 to 300, got 301"),
        ({"swa_start": 299}, "one collected epoch has no variance"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive"),
        ({"swa_learning_rate": float("nan")}, "swa_learning_rate must be a positive"),
        ({"batch_size": 0}, "batch_size must be a positive"),
        ({"rank": 1}, "rank must be at least 2"),
        ({"momentum": 1.0}, "momentum must be in"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(Training(), **wrong)
