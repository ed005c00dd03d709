"""Recorded inputs of the last layer, injected label noise, and scores that find it."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cases import normal
from stores import made, store_in
from studies import label_noise
from studies.data import Labelled, cifar10
from studies.features import BATCH, features
from studies.label_noise import LabelNoiseStudy
from studies.models import Description, weights
from studies.models.weights import Weights

# Recorded inputs of the last layer: those of the network, of these weights and images -------------


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


# Injected label noise, and scores that find it ----------------------------------------------------


@pytest.mark.parametrize("data", [label_noise.MNIST, label_noise.CIFAR10])
@pytest.mark.parametrize("noise", [label_noise.SYMMETRIC, label_noise.ASYMMETRIC])
def test_the_right_share_of_labels_is_wrong(data, noise):
    labels = torch.arange(1000) % 10
    noisy = label_noise.with_noise(labels, data, noise, 0.3, seed=1)
    wrong = noisy != labels
    assert int(wrong.sum()) == 300
    pairs = {(a, b) for a, b in zip(labels[wrong].tolist(), noisy[wrong].tolist(), strict=True)}
    if noise == label_noise.ASYMMETRIC:
        assert pairs == set(enumerate(label_noise.CONFUSED[data]))
    else:
        assert len(pairs) > 80
    assert torch.equal(noisy, label_noise.with_noise(labels, data, noise, 0.3, seed=1))


@pytest.mark.parametrize("data", [label_noise.MNIST, label_noise.CIFAR10])
def test_no_class_is_confused_with_itself(data):
    assert len(label_noise.CONFUSED[data]) == 10
    assert all(a != b for a, b in enumerate(label_noise.CONFUSED[data]))


def test_scores_are_what_they_are_called():
    x = normal(200, 12).float()
    labels = x[:, :10].argmax(-1)
    network = nn.Linear(12, 10)
    with torch.no_grad():
        network.weight.copy_(2 * torch.eye(10, 12))
    data = Labelled(x, labels)
    asked = Labelled(x[:20], (labels[:20] + 1) % 10)
    found = label_noise.scores(network, data, data, asked, 0.01)
    assert tuple(found) == label_noise.SCORES
    losses = nn.functional.cross_entropy(network(asked.inputs), asked.labels, reduction="none")
    torch.testing.assert_close(found[label_noise.LOSS], losses.detach())
    probs = network(asked.inputs).softmax(-1).detach().double()
    for i, label in enumerate(asked.labels.tolist()):
        others = [p for k, p in enumerate(probs[i].tolist()) if k != label]
        margin = math.log(max(others)) - math.log(probs[i, label])
        distance = math.sqrt((1 - probs[i, label]) ** 2 + sum(p**2 for p in others))
        assert found[label_noise.MARGIN][i].item() == pytest.approx(margin, rel=1e-4, abs=1e-4)
        assert found[label_noise.EL2N][i].item() == pytest.approx(distance, rel=1e-4)
    torch.testing.assert_close(
        found[label_noise.LOSS_REGRET] - found[label_noise.REGRET], losses.detach()
    )
    for i in range(3):
        loss = nn.functional.cross_entropy(network(x[i : i + 1]), asked.labels[i : i + 1])
        grads = torch.autograd.grad(loss, list(network.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        torch.testing.assert_close(found[label_noise.GRAND][i].float(), norm, rtol=1e-4, atol=1e-5)
    clean = label_noise.scores(network, data, data, Labelled(x[:20], labels[:20]), 0.01)
    for score in label_noise.SCORES:
        if score != "ACNML regret":  # which does not look at labels
            assert found[score].mean() > clean[score].mean()


def test_a_tiny_study_end_to_end(tmp_path, monkeypatch):
    x = normal(400, 16).float().abs()
    monkeypatch.setattr(
        label_noise, "load_mnist", lambda part: Labelled(x.view(400, 1, 4, 4), x[:, :10].argmax(-1))
    )
    study = label_noise.LabelNoiseStudy(
        data=(label_noise.MNIST,),
        rates=(0.2,),
        train=150,
        held_out=100,
        new=100,
        epochs=5,
        seeds=(0, 1),
    )
    page = label_noise.run(study, tmp_path, store_in(tmp_path, study), "the command")
    assert "Written by `the command`, acnml" in (tmp_path / "results.md").read_text()
    assert "the command" in page.read_text()
    text = (tmp_path / "results.md").read_text()
    assert all(f"| {score} |" in text for score in label_noise.SCORES)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 2 * len(label_noise.SCORES)
