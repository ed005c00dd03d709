"""What tests of fits share: data, the exact Gauss-Newton matrix, and curvatures as matrices."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

from acnml._util.batches import as_arguments, size, take
from acnml.fit import Curvature
from cases import MODELS, Case, normal
from dense import covariance

STRUCTURES = ("diag", "kron", "ekfac", "full")


def one_position() -> nn.Module:
    """Convolutions that see their whole input at once, one of them grouped."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 4, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 1, bias=False), nn.Flatten()
    )


ONE_POSITION = [MODELS[0], MODELS[1], Case("1x1", one_position, lambda n: normal(n, 2, 4, 4))]
CASES = [*MODELS, ONE_POSITION[2]]


def labelled(case: Case, *sizes: int) -> list[tuple[Any, Tensor]]:
    """Examples in batches of these sizes, with labels 0, 1, 2 in turn."""
    x, y, ends = case.x(sum(sizes)), torch.arange(sum(sizes)) % 3, torch.tensor(sizes).cumsum(0)
    parts = [slice(int(end) - n, int(end)) for n, end in zip(sizes, ends, strict=True)]
    return [(take(x, part), y[part]) for part in parts]


def loaders() -> tuple[DataLoader, DataLoader]:
    """Noisy data of three classes, in single precision, to train and to validate with."""
    x, noise = normal(600, 4, seed=0).float(), normal(600, 3, seed=1).float()
    labels = (2 * x[:, :3] + noise).argmax(-1)
    train, validation = (TensorDataset(x[s], labels[s]) for s in (slice(0, 200), slice(200, None)))
    return DataLoader(train, batch_size=50), DataLoader(validation, batch_size=100)


def gauss_newton(model: nn.Module, x: Any, names: Any) -> Tensor:
    """Σ_n Jᵀ (diag p - ppᵀ) J over the flattened named parameters."""
    params = {n: p.detach() for n, p in model.eval().named_parameters() if n in names}
    total = torch.zeros(())
    for i in range(size(x)):
        args, kwargs = as_arguments(take(x, slice(i, i + 1)))

        def logits(named, args=args, kwargs=kwargs):
            return functional_call(model, named, args, kwargs)[0]

        J = torch.cat([j.flatten(1) for j in jacrev(logits)(params).values()], dim=1)
        p = logits(params).softmax(-1)
        total = total + J.T @ (torch.diag(p) - p.outer(p)) @ J
    return total


def dense(curvature: Curvature) -> Tensor:
    """H in the order of the flattened mean."""
    precision = torch.linalg.inv(covariance(curvature.posterior(1.0)))
    return precision - torch.eye(len(precision)).double()


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for part in value for t in tensors(part)] if isinstance(value, tuple) else []


def assert_identical(actual: Any, expected: Any) -> None:
    """Compare values of the same type by the bits of their tensors."""
    assert type(actual) is type(expected)
    pairs = list(zip(tensors(actual), tensors(expected), strict=True))
    assert len(pairs) >= 2
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
