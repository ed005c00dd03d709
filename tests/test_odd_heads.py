"""Logits that are linear in the covered layer, but are not simply its outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acnml import Acnml, Classifier, Glm, Linearised, Reference
from cases import POSTERIORS, diagonal, normal

X = normal(3, 4)


class Divided(nn.Module):
    """Has a temperature of its own."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x):
        return self.head(x) / 2.5


class DividedByNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) / x.norm(dim=1, keepdim=True)


def seeded(build) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double()


HEADS = {
    "divided by a norm": (DividedByNorm, X),
    "scores of items": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten()), normal(3, 5, 4)),
    "pairs of scores": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten()), normal(3, 2, 4)),
    "positions of an image": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten()),
        normal(3, 2, 3, 4),
    ),
    "grouped convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()),
        normal(3, 4, 3, 3),
    ),
    "batch norm": (lambda: nn.BatchNorm1d(4), X),
    "layer norm": (lambda: nn.LayerNorm(4), X),
}


@pytest.mark.parametrize("name", ["diagonal", "low_rank"])
@pytest.mark.parametrize("head", HEADS)
def test_the_fast_solution_is_the_optimum(head, name):
    build, x = HEADS[head]
    model = seeded(build)
    classifier, posterior = Classifier(model), POSTERIORS[name](model)
    best = Reference(400, 0.2)(classifier, posterior, x)  # the problem is convex
    fast = Linearised(tolerance=1e-12)(classifier, posterior, x)
    torch.testing.assert_close(fast.log_lik, best.log_lik, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [Acnml, Glm])
def test_a_temperature_within_the_model_is_that_of_a_view(rule):
    model = Divided(seeded(lambda: nn.Linear(4, 3)))
    inside = rule(Classifier(model), diagonal(model))
    outside = rule(Classifier(model.head).tempered(2.5), diagonal(model.head))
    torch.testing.assert_close(inside(X), outside(X), rtol=0, atol=1e-6)
