"""Recorded inputs of the last layer: those of the network, of these weights and images."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stores import made, store_in
from studies.data import Labelled, cifar10
from studies.features import BATCH, features
from studies.label_noise import LabelNoiseStudy
from studies.models import Description, weights
from studies.models.weights import Weights


def network(classes: int = 10) -> nn.Module:
    layers = nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, classes)
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), *layers)


def images(seed: int) -> Labelled:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(256, (BATCH + 7, 3, 32, 32), generator=generator).byte()
    return Labelled(drawn, torch.arange(len(drawn)) % 10)


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """Return weights of a seed, which replace those of another seed in the same file."""
    described = Description(network, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "tiny.safetensors")
    monkeypatch.setattr(weights, "MODELS", {"tiny": described})
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    (tmp_path / "weights").mkdir()

    def of_seed(seed: int) -> Weights:
        state = described.untrained(seed).state_dict()
        save_file(state, tmp_path / "weights" / "tiny.safetensors")
        return Weights.given("tiny")

    return of_seed


def test_they_are_what_the_last_layer_receives(stored, tmp_path):
    given, data = stored(0), images(0)
    found = features("some", given, data, store_in(tmp_path, LabelNoiseStudy()))
    inside = given.build()[:-1]((cifar10.to_unit(data.inputs) - 0.5) / 0.2)
    torch.testing.assert_close(found.inputs, inside)
    assert torch.equal(found.labels, data.labels)


def test_other_weights_and_images_are_recorded_again(stored, tmp_path):
    store = store_in(tmp_path, LabelNoiseStudy())
    first = features("some", stored(0), images(0), store).inputs
    assert torch.equal(features("some", stored(0), images(0), store).inputs, first)
    assert len(made(tmp_path)) == 1
    assert not torch.equal(features("some", stored(0), images(1), store).inputs, first)
    assert not torch.equal(features("some", stored(1), images(0), store).inputs, first)
    assert len(made(tmp_path)) == 3


def test_a_network_without_given_weights_is_refused(monkeypatch):
    monkeypatch.setattr(weights, "MODELS", {"tiny": Description(network)})
    with pytest.raises(ValueError, match="tiny has no trained weights"):
        Weights.given("tiny")
