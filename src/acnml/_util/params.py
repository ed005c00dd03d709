"""Named parameters and their small algebra.

A point in parameter space is a dict from parameter names to tensors. Any tensor may carry leading
batch dimensions before the parameter's own shape, the same ones under every name; functions that
must tell the two apart take `like`, an unbatched dict of the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]

T = TypeVar("T")


def zip_with(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply a function to the tensors that share a name."""
    return {name: function(first[name], *(other[name] for other in others)) for name in first}


def add(a: Params, b: Params) -> Params:
    """Add, name by name: a + b."""
    return zip_with(torch.add, a, b)


def subtract(a: Params, b: Params) -> Params:
    """Subtract, name by name: a - b."""
    return zip_with(torch.sub, a, b)


def scale(params: Params, factor: float) -> Params:
    """Multiply every tensor by a number."""
    return {name: tensor * factor for name, tensor in params.items()}


def flatten(params: Params, like: Params) -> Tensor:
    """Concatenate into vectors (*batch, P), in the order of `like`."""
    return torch.cat(
        [
            params[name].reshape(*params[name].shape[: params[name].ndim - shape.ndim], -1)
            for name, shape in like.items()
        ],
        dim=-1,
    )


def unflatten(vector: Tensor, like: Params) -> Params:
    """Invert `flatten`: (*batch, P) to named tensors with the same leading dimensions."""
    pieces = vector.split([tensor.numel() for tensor in like.values()], dim=-1)
    return {
        name: piece.reshape(*piece.shape[:-1], *tensor.shape)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }


def dot(a: Params, b: Params, like: Params) -> Tensor:
    """Return the inner product over all names, one number per leading batch index."""
    products = [
        (a[name] * b[name]).flatten(-shape.ndim).sum(-1) if shape.ndim else a[name] * b[name]
        for name, shape in like.items()
    ]
    return torch.stack(torch.broadcast_tensors(*products)).sum(0)


def widened(params: Params) -> Params:
    """Return the tensors in single precision at least: half precision is for networks only."""
    return {n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in params.items()}


def standard_normal(like: Params, n: int, generator: torch.Generator) -> Params:
    """Draw n points of independent N(0, 1), with a leading dimension n.

    Drawn on the generator's device and then moved, so that a seed means the same numbers wherever
    the parameters live.
    """
    return {name: normal_like(tensor, n, generator) for name, tensor in like.items()}


def normal_like(tensor: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n tensors of independent N(0, 1) with the shape, dtype and device of `tensor`."""
    noise = torch.randn(
        (n, *tensor.shape), generator=generator, device=generator.device, dtype=tensor.dtype
    )
    return noise.to(tensor.device)


def count(params: Params) -> int:
    """Return the number of scalars."""
    return sum(tensor.numel() for tensor in params.values())


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """Rebuild a value (dataclass, mapping, tuple, list) with every tensor in it transformed."""
    rebuilt: Any = value
    if isinstance(value, Tensor):
        rebuilt = function(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: map_tensors(getattr(value, field.name), function)
            for field in dataclasses.fields(value)
            if field.init
        }
        rebuilt = type(value)(**fields)
    elif isinstance(value, Mapping):
        rebuilt = {key: map_tensors(item, function) for key, item in value.items()}
    elif isinstance(value, (tuple, list)):
        rebuilt = type(value)(map_tensors(item, function) for item in value)
    return rebuilt
