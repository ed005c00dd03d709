"""Modes: for every label the network that explains it best; and the complexity of labels."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Ensemble, Map, Modes, tuning
from cases import LINEAR, MLP, POSTERIORS, TwoLayers, diagonal, last_layer, normal, seeded


def members(n: int = 3, alpha: float = 0.5, build=last_layer) -> list[Acnml]:
    models = [seeded(TwoLayers, seed) for seed in range(n)]
    return [Acnml(Classifier(model), build(model), alpha=alpha) for model in models]


@pytest.mark.parametrize("build", [last_layer, POSTERIORS["kronecker_eigen"]])
def test_it_is_the_maximum_over_modes(build):
    parts, x = members(build=build), MLP.x(5)
    modes = Modes(tuple(parts))
    expected = torch.stack([part.log_lik(x) for part in parts])
    torch.testing.assert_close(modes.log_lik(x), expected.amax(0))
    torch.testing.assert_close(modes(x), expected.amax(0).log_softmax(-1))
    torch.testing.assert_close(modes.regret(x), expected.amax(0).logsumexp(-1))
    assert len(expected.argmax(0).unique()) > 1


def test_one_mode_is_its_member_and_copies_change_nothing():
    (part,), x = members(1), MLP.x(5)
    assert torch.equal(Modes([part])(x), part(x))
    assert torch.equal(Modes([part, part, part])(x), part(x))


def test_every_member_adds_to_the_regret():
    parts, x = members(4), MLP.x(20)
    regrets = [Modes(parts[:n]).regret(x) for n in range(1, 5)]
    for fewer, more in itertools.pairwise(regrets):
        assert (more >= fewer).all()
    assert (regrets[0] > 0).all()
    assert (regrets[-1] < math.log(3)).all()


def test_small_alpha_is_the_maximum_of_the_networks():
    parts, x = members(3, alpha=1e-9), MLP.x(5)
    expected = torch.stack([Map(part.classifier)(x) for part in parts]).amax(0)
    torch.testing.assert_close(Modes(parts).log_lik(x), expected, rtol=0, atol=1e-6)


def test_weights_are_handicaps_relative_to_the_heaviest():
    parts, x = members(2), MLP.x(5)
    first, second = (part.log_lik(x) for part in parts)
    handicapped = Modes(parts, (0.0, -1.5))
    torch.testing.assert_close(handicapped.log_lik(x), torch.maximum(first, second - 1.5))
    shifted = Modes(parts, (7.0, 5.5))
    torch.testing.assert_close(shifted.log_lik(x), handicapped.log_lik(x))
    assert torch.equal(Modes(parts, (0.0, -1e6))(x), parts[0](x))


class Shuffled:
    """Gives the same data in another order every time, as a loader with shuffle=True."""

    def __init__(self, x, labels):
        self.data, self.generator = (x, labels), torch.Generator().manual_seed(0)

    def __iter__(self):
        order = torch.randperm(len(self.data[1]), generator=self.generator)
        return iter([tuple(tensor[rows] for tensor in self.data) for rows in order.split(25)])


@pytest.mark.parametrize(
    "make",
    [
        lambda alpha: Modes(members(2)).with_alpha(alpha),
        lambda alpha: Ensemble(Modes(members(2)).with_alpha(alpha).predictors),
        lambda alpha: Ensemble([Map(part.classifier) for part in members(2)]),
        lambda alpha: Ensemble((members(2)[0], Map(members(2)[1].classifier))),
    ],
)
def test_members_are_tuned_on_the_same_inputs(make):
    x = normal(100, 4, seed=8)
    labels = x.argmax(-1) % 3
    for row in tuning.sweep(make, [0.1, 1.0], Shuffled(x, labels)):
        expected = make(row.value)(x)
        assert row.nll == pytest.approx(acnml.metrics.nll(expected, labels))
        assert row.accuracy == pytest.approx(acnml.metrics.accuracy(expected, labels))


def test_several_networks_are_stored_in_one_file(tmp_path):
    parts, x, path = members(3), MLP.x(5), tmp_path / "modes.safetensors"
    modes = Modes(parts, (0.0, -0.1, -0.2))
    acnml.save(modes, path)
    networks = [Classifier(seeded(TwoLayers, seed)) for seed in range(3)]
    loaded = acnml.load(path, networks)
    assert torch.equal(loaded(x), modes(x))
    assert loaded.log_weights == modes.log_weights


# Complexity --------------------------------------------------------------------------------------


def test_complexity_is_loss_minus_gain_plus_regret():
    model, x, labels = LINEAR.model(), LINEAR.x(4), torch.tensor([0, 2, 1, 1])
    predict = Acnml(Classifier(model), diagonal(model), alpha=0.7)
    solution = predict.solve(x)
    index = labels.unsqueeze(1)
    loss = nn.functional.cross_entropy(model(x), labels, reduction="none").detach()
    gain = solution.log_lik.gather(1, index).squeeze(1) + loss
    expected = loss - gain + solution.regret
    assert (gain > 0).all()
    torch.testing.assert_close(predict.complexity(x, labels), expected)
    arrays = predict.complexity(x.numpy(), labels.numpy())
    assert np.allclose(arrays, expected.numpy())
    nll = acnml.metrics.nll(predict(x), labels)
    assert arrays.mean() == pytest.approx(nll)
