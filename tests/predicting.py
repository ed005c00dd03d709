"""Shared by the tests of predictors: cases, fingerprints, dropout, invalid inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from acnml.problem import Problem, problems
from cases import MODELS, POSTERIORS, Case, normal

CASES = [
    pytest.param(case, build, id=f"{case.name}-{name}")
    for case in MODELS
    for name, build in POSTERIORS.items()
]
every_case = pytest.mark.parametrize(("case", "build"), CASES)  # for comparisons with oracles
# For properties: every model with one posterior, and two models with all.
each_case = pytest.mark.parametrize(
    ("case", "build"),
    [c for c in CASES if c.id.endswith("low_rank") or c.id.startswith(("conv-", "sequence-"))],
)
FINE = {"rtol": 1e-11, "atol": 1e-12}


def moments_of(classifier, posterior, x) -> Problem:
    """The logits and all of their covariance."""
    return Problem.joined([*problems(classifier, posterior, x, differences=False)])


def fingerprint(model: nn.Module) -> list:
    tensors = [*model.parameters(), *model.buffers()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    versions = [tensor._version for tensor in tensors]
    return [[t.detach().clone() for t in tensors], grads, modes, flags, versions]


def same(a, b) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def bad_inputs() -> list:
    mlp, two = MODELS[1], MODELS[4]
    spoiled = normal(3, 4)
    spoiled[1, 2] = torch.nan
    return [
        (mlp, spoiled, "input x is NaN or infinite for 1 of 3 inputs, first at index 1"),
        (mlp, spoiled.nan_to_num(nan=torch.inf), "first at index 1"),
        (mlp, torch.zeros(0, 4), "the batch is empty"),
        (mlp, torch.tensor(1.0), "its first dimension must be the batch"),
        (mlp, normal(3, 5), r"failed on inputs of shape {'x': \(\d, 5\)}"),
        (mlp, normal(4), r"the batch dimension is missing: .* pass x\[None\]"),
        (two, (normal(3, 3), normal(2, 2)), "differ in length"),
        (two, (normal(3, 3),), "failed on inputs"),
        (two, {"left": normal(3, 3), "wrong": normal(3, 2)}, "failed on inputs"),
        (two, (), "contains no tensors"),
    ]


def posterior_over(name: str, *shape: int) -> acnml.Diagonal:
    return acnml.Diagonal({name: torch.zeros(shape)}, {name: torch.ones(shape)})


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class Dropping(nn.Module):
    """A case's model with dropout on its logits, whatever its inputs are."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(rate)

    def forward(self, *args, **kwargs):
        return self.dropout(self.model(*args, **kwargs))


def dropping(case: Case, rate: float) -> nn.Module:
    return Dropping(case.model(), rate)
