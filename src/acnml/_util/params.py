"""Vectors in parameter space, and arithmetic on them.

A vector is a dict from parameter names to tensors. The tensors may have batch dimensions before the
parameter's own shape, the same ones for every name. Functions that must distinguish the two take
`like`, a dict of the same names without batch dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]

T = TypeVar("T")

# Floating point types that networks are converted to, to save memory.
COARSE = (torch.float32, torch.float16, torch.bfloat16)


def zip_with(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply a function name by name to the tensors of several vectors."""
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
    """Concatenate all parameters into a tensor (*batch, P), in the order of `like`."""
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
    """Return the tensors in at least single precision, because half precision is too inaccurate."""
    return {n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in params.items()}


def standard_normal(like: Params, n: int, generator: torch.Generator) -> Params:
    """Draw n vectors of independent N(0, 1) entries, with a leading dimension n.

    The numbers are drawn on the generator's device and then moved. A seed therefore gives the same
    numbers on every device of the parameters.
    """
    return {name: normal_like(tensor, n, generator) for name, tensor in like.items()}


def normal_like(tensor: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n tensors of independent N(0, 1) entries, each like `tensor`."""
    noise = torch.randn(
        (n, *tensor.shape), generator=generator, device=generator.device, dtype=tensor.dtype
    )
    return noise.to(tensor.device)


def count(params: Params) -> int:
    """Return the total number of entries."""
    return sum(tensor.numel() for tensor in params.values())


def is_same_or_rounded(tensor: Tensor, original: Tensor) -> bool:
    """Whether a tensor has the numbers of another one, up to a conversion to a coarser type."""
    original = original.to(tensor.device)
    return any(
        torch.equal(rounded, original.to(rounded.dtype))
        for rounded in conversions(tensor, original.dtype)
    )


def conversions(tensor: Tensor, original: torch.dtype) -> Iterator[Tensor]:
    """Yield a tensor in each type in which it may equal one that was of the type `original`.

    That is `original` itself, and the coarser types that hold the tensor's numbers exactly. So a
    copy in another precision can be told from a tensor that has been trained since.
    """
    for dtype in dict.fromkeys((original, *COARSE)):
        rounded = tensor.to(dtype)
        if dtype == original or torch.equal(rounded.to(tensor), tensor):
            yield rounded


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """Copy a value (dataclass, mapping, tuple, list) and transform every tensor in it."""
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
        items = [map_tensors(item, function) for item in value]
        is_named = hasattr(value, "_fields")  # a named tuple takes its items one by one
        rebuilt = type(value)(*items) if is_named else type(value)(items)
    return rebuilt
