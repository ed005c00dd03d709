"""Where features are taken in a network, and what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from acnml import Classifier, calibrate
from acnml.features import MOST_FEATURES, Folding, Place, Taps, direction_and_length, find_places
from cases import normal


def conv_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        ).double()


def places_of(model, x):
    return find_places(Classifier(model), x)


def read(model, places, x):
    return Taps(Classifier(model), places)(x)[1]


def padded(padding: type[nn.Module]) -> nn.Module:
    """A layer that only pads, before the second stage."""
    layers = list(conv_net())
    return nn.Sequential(*layers[:3], nn.Sequential(padding(2), nn.AvgPool2d(5, 1)), *layers[3:])


IMAGES, VECTORS = normal(4, 2, 8, 8), normal(5, 4)
LINEAR = (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        # the last tensor with 8×8 positions, the last with 4×4, and two vectors
        (conv_net(), IMAGES, [Place("1"), Place("5"), Place("8", True), Place("10", True)]),
        *(
            (padded(kind), IMAGES, [Place("1"), Place("6"), Place("9", True), Place("11", True)])
            for kind in (nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d)
        ),
        # hidden layers of an MLP, and not its inputs; those of a linear model
        (nn.Sequential(*LINEAR).double(), VECTORS, [Place("2", True), Place("4", True)]),
        (nn.Linear(4, 3).double(), VECTORS, [Place("", True, is_scaled=False)]),
        (
            nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 4)).double(),
            normal(4, 2, 7),
            [Place("1"), Place("3", True)],
        ),
    ],
)
def test_default_places(model, x, expected):
    assert list(places_of(model, x)) == expected


class Attention(nn.Module):
    """Has modules of its own for keys and weights, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.k_norm, self.attn_drop = nn.Linear(6, 18), nn.LayerNorm(3), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop((q @ self.k_norm(k).mT).softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.norm = nn.Conv2d(3, 6, 2, 2), Attention(), nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).mT
        return self.head(self.norm(tokens + self.attn(tokens)).mean(1))


def test_hidden_states_of_a_vision_transformer_and_nothing_inside_its_attention():
    assert places_of(Vision(), torch.randn(5, 3, 8, 8)) == (
        Place("norm", channels=-1),
        Place("head", is_input=True),
    )


class Text(nn.Module):
    """Masks padding by itself, from the token ids."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.embed = nn.Embedding(10, 6)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        padding = tokens == 0
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        kept = hidden.masked_fill(padding[..., None], 0.0)
        return self.head(kept.sum(1) / (~padding).sum(1, keepdim=True))


def test_a_texts_features_do_not_depend_on_how_far_it_is_padded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Text().double().eval()
    tokens = 1 + torch.arange(20).view(4, 5) % 9
    places = places_of(model, tokens)
    assert places == (Place("head", is_input=True),)
    longer = nn.functional.pad(tokens, (0, 6))
    torch.testing.assert_close(read(model, places, longer), read(model, places, tokens))


def test_pooling_is_mean_and_deviation_over_positions():
    x = normal(3, 4, 5, 6)
    by_hand = torch.stack([torch.cat([i.mean((1, 2)), i.std((1, 2), correction=0)]) for i in x])
    torch.testing.assert_close(Place("").pooled((), x), by_hand)
    torch.testing.assert_close(Place("", channels=-1).pooled((), x.movedim(1, -1)), by_hand)


def test_tensors_that_later_modules_overwrite_are_kept():
    """The output of the convolution is overwritten by the ReLU behind it."""
    model, x = conv_net(), normal(4, 2, 8, 8)
    expected = Place("0").pooled((), model[0](x))
    torch.testing.assert_close(read(model, [Place("0", is_scaled=False)], x), expected)


def test_features_are_directions_and_lengths_at_every_place():
    model, x = conv_net(), normal(4, 2, 8, 8)
    plain = [read(model, [Place(name, is_scaled=False)], x) for name in "03"]
    both = read(model, [Place("0"), Place("3")], x)
    first, length, *_ = both.split([plain[0].shape[1], 1, plain[1].shape[1], 1], dim=1)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(4).double())
    torch.testing.assert_close(first * length, plain[0])
    torch.testing.assert_close(both, torch.cat([direction_and_length(own) for own in plain], 1))
    assert not direction_and_length(torch.zeros(1, 3)).any()
    assert np.array_equal(direction_and_length(plain[0].numpy()), direction_and_length(plain[0]))


def test_many_features_are_folded():
    x = normal(50, 2 * MOST_FEATURES + 7)
    folding = Folding.of(x)
    folded = folding(x)
    assert folded.shape == (50, MOST_FEATURES)
    by_hand = (x * folding.factors)[:, [5, 5 + MOST_FEATURES, 5 + 2 * MOST_FEATURES]].sum(1)
    torch.testing.assert_close(folded[:, 5], by_hand)
    assert Folding.of(x[:, :MOST_FEATURES]) is None


class Branching(nn.Module):
    """Leaves a layer out for batches with a large entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.h, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        z = torch.tanh(self.first(x))
        if x.abs().max() < 100:
            z = torch.tanh(self.h(z))
        return self.head(z)


def test_a_batch_that_does_not_reach_a_place_has_no_features():
    """It must not get the features of the batch before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branching().double()
    x = normal(600, 4)
    labels = (3 * model(x).detach() + 0.5 * normal(600, 3, seed=1)).argmax(-1)
    data = (x[:300], labels[:300]), (x[300:], labels[300:])
    found = calibrate(model, *data, price=0.02, places=[Place("h")])
    module = found.as_module()
    assert found(x).probs.isfinite().all()
    assert module(x)[0].isfinite().all()
    for use in (found, module):
        with pytest.raises(ValueError, match="the model did not run output of 'h'"):
            use(1e4 * x)


def test_a_place_without_the_batch_is_named():
    class Turned(nn.Module):
        """A layer that receives (positions, B, features)."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.embed(x.movedim(1, 0)).mean(0))

    with pytest.raises(ValueError, match="output of 'embed' has 6 rows for a batch of 40 inputs"):
        read(Turned().double(), [Place("embed", channels=-1)], normal(40, 6, 3))


def test_a_model_without_places_is_told_to_name_some():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return x @ self.weight

    message = r'name places, such as places=\[acnml\.features\.Place\("encoder"'
    with pytest.raises(ValueError, match=message):
        places_of(Model(), torch.randn(20, 4))
