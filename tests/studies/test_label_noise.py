"""Injected label noise, and scores that find it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cases import normal
from stores import store_in
from studies import label_noise
from studies.data import Labelled


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
