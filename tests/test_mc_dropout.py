"""MC dropout: exact moments, sums over all masks, and every kind of dropout layer."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from acnml import Classifier, Map, McDropout
from acnml._util.torch_state import seeded
from acnml.predictors import mc_dropout
from cases import MODELS, normal, small_network
from predicting import FINE, dropping


def input_dropout(rate: float, classes: int = 3, inplace: bool = False) -> nn.Module:
    """A linear model whose inputs are dropped."""
    return small_network(nn.Dropout(rate, inplace=inplace), nn.Linear(4, classes))


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_zero_dropout_is_map(case):
    classifier = Classifier(dropping(case, 0.0))
    torch.testing.assert_close(
        McDropout(classifier, samples=3)(case.x()), Map(classifier)(case.x()), **FINE
    )


def test_dropout_is_the_average_over_its_forward_passes():
    model, x = input_dropout(0.5), normal(3, 4)
    with seeded(7):
        probs = torch.stack([model.train()(x).softmax(-1) for _ in range(5)])
    actual = McDropout(Classifier(model), samples=5, seed=7)(x)
    torch.testing.assert_close(actual.exp(), probs.mean(0).detach(), **FINE)


def test_dropout_is_on_and_batch_norm_is_not():
    norm, x = nn.BatchNorm1d(32), normal(1, 8, 2, 2)
    model = small_network(nn.Dropout2d(0.5), nn.Flatten(), norm, nn.Linear(32, 3))
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))
    with seeded(2):
        dropped = model.eval()[0].train()(x)
    expected = model[1:](dropped).log_softmax(-1).detach()  # a batch of one has no batch statistics
    actual = McDropout(Classifier(model.train()), samples=1, seed=2)(x)
    torch.testing.assert_close(actual, expected, **FINE)
    assert not torch.allclose(actual, Map(Classifier(model))(x))


def test_dropout_is_off_again_afterwards_also_after_a_failure():
    classifier, state = Classifier(input_dropout(0.5)), torch.get_rng_state()
    before = Map(classifier)(normal(3, 4))
    McDropout(classifier)(normal(3, 4))
    with pytest.raises(ValueError, match="failed on inputs"):
        McDropout(classifier)(normal(3, 5))
    assert torch.equal(Map(classifier)(normal(3, 4)), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout, (5, 4)),
        (nn.Dropout1d, (5, 4)),  # no batch dimension, says torch
        (nn.Dropout1d, (5, 4, 3)),
        (nn.Dropout2d, (5, 4, 3, 2)),
        (nn.Dropout3d, (5, 4, 3, 2)),
        (nn.Dropout3d, (5, 4, 3, 2, 2)),
    ],
)
def test_masks_are_those_of_torch(layer, shape, rate):
    own, x = layer(rate).double(), normal(*shape)
    with seeded(3):
        expected = own.train()(x)
    hook = mc_dropout._dropping(own, torch.Generator().manual_seed(3))
    torch.testing.assert_close(hook(own, (x,), x), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_of_another_kind_is_refused(layer):
    model = small_network(nn.Dropout(0.5), layer(0.5), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=f"no masks for the {layer.__name__} '1'"):
        McDropout(Classifier(model))


class Drawing(nn.Module):
    """Draws from the global generator while the network runs, as another thread may."""

    drawn: ClassVar[list[torch.Tensor]] = []

    def forward(self, x):
        self.drawn.append(torch.rand(1))
        return x


def test_the_global_generator_is_left_alone():
    """Reseeded, it would give others the same numbers again and again."""
    model = small_network(Drawing(), nn.Dropout(0.5), nn.Linear(4, 3))
    Drawing.drawn.clear()
    with seeded(5):
        McDropout(Classifier(model), samples=10)(normal(3, 4))
        own = torch.rand(1)
    with seeded(5):
        expected = torch.rand(len(Drawing.drawn) + 1)
    assert torch.equal(torch.cat([*Drawing.drawn, own]), expected)
