"""What `calibrate` refuses or warns of, because answers could not be trusted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import acnml
from cases import TwoLayers, normal


class Two(TwoLayers):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(hidden=16)


class FirstBatch(Two):
    """Subtracts the mean of the first batch that it saw."""

    mu = None

    def forward(self, x):
        if self.mu is None:
            self.mu = x.mean(0)
        return super().forward(x - self.mu)


class Recurrent(Two):
    """Goes on from the state in which the last batch left it."""

    state = None

    def forward(self, x):
        before = 0.0 if self.state is None else self.state
        self.state = x.sum()
        return super().forward(x + before)


class Level(Two):
    """Has logits on a high level, and subtracts the mean of the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0)) + 1e4


def data(model: nn.Module, n: int = 400):
    x = normal(n, 4, seed=3).float()
    with torch.no_grad():
        labels = Two()(x).argmax(-1)
    labels[::4] = (labels[::4] + 1) % 3
    return (x[: n // 2], labels[: n // 2]), (x[n // 2 :], labels[n // 2 :])


@pytest.mark.parametrize("kind", [FirstBatch, Recurrent, Level])
def test_models_that_remember_or_mix_inputs_are_refused(kind):
    model = kind()
    with pytest.raises(ValueError, match=r"rest of its batch|random even in eval"):
        acnml.calibrate(model, *data(model))


def test_a_high_level_alone_is_no_reason():
    class High(Two):
        def forward(self, x):
            return super().forward(x) + 1e4

    acnml.calibrate(High(), *data(High()), price=0.1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinite_features_have_no_answer_anywhere(bad):
    model = Two()
    train, validation = data(model)
    x = train[0][:5].clone()
    x[2, 1] = bad
    calibrated = acnml.calibrate(model, train, validation, price=0.1)
    with pytest.raises(ValueError, match="first at index 2"):
        calibrated(x)
    flagged = acnml.calibrate(model, train, validation, price=0.1, on_error="flag")
    none = [False, False, True, False, False]
    assert flagged(x).log_probs.isnan().any(1).tolist() == none
    assert flagged(x).label.tolist()[2] == flagged.predict(x).tolist()[2] == -1
    for by in ("confidence", "regret"):
        assert flagged.abstains(x, share=0.0, by=by).tolist() == none
    for part in calibrated.as_module()(x):
        assert part.reshape(5, -1).isnan().any(1).tolist() == none


class Beside(Two):
    """Has a branch whose hidden values depend on the batch, unlike the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        self.other(hidden - hidden.mean(0))
        return self.head(hidden)


def test_features_that_depend_on_the_batch_are_left_out():
    model = Beside()
    found = acnml.calibrate(model, *data(model), price=0.1)
    assert [place.module for place in found.places] == ["head"]
    places = [acnml.features.Place("other", is_input=True), *found.places]
    with pytest.raises(ValueError, match="the input of 'other', depend on the rest of its batch"):
        acnml.calibrate(model, *data(model), places=places)
