"""Logits that are linear in the covered layer, but are not simply its outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Glm, Linearised
from acnml.solve import Reference
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


class CooledWhenFar(nn.Module):
    """Changes the logits of far inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        logits = self.head(x)
        far = x.abs().amax(1) > 5
        if far.any():
            logits[far] *= 0.1
        return logits


def test_logits_changed_in_place_are_noticed_in_any_batch():
    model, far = seeded(CooledWhenFar), 10 * X
    first, later = (Acnml(Classifier(model), diagonal(model)) for _ in range(2))
    later(X)  # the model is checked with inputs that are not changed
    torch.testing.assert_close(later.log_lik(far), first.log_lik(far), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["", "2"])
def test_modules_run_the_hooks_of_the_last_layer_once(name):
    model = seeded(lambda: nn.Linear(4, 3) if not name else _three_layers())
    layer = model.get_submodule(name)
    layer.register_forward_pre_hook(lambda _, args: (2 * args[0] + 1,))
    layer.register_forward_hook(_unchanged)
    x = normal(300, 4)
    labels = (model(x).detach() + normal(300, 3, seed=1)).argmax(-1)
    found = acnml.calibrate(model, (x[:100], labels[:100]), (x[100:], labels[100:]), price=0.05)
    log_probs, regret, _ = found.as_module()(X)
    torch.testing.assert_close(log_probs.double(), found.log_probs(X), rtol=0, atol=1e-5)
    torch.testing.assert_close(regret.double(), found.regret(X), rtol=0, atol=1e-5)
    assert len(layer._forward_pre_hooks) == 1  # the user's model keeps its own


def _three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def _unchanged(module, args, output):
    assert torch.equal(output, nn.functional.linear(args[0], module.weight, module.bias))
