"""Batches of inputs as users have them: a tensor, a tuple of tensors, or a mapping of tensors.

A tensor goes to the model as `model(x)`, a tuple or list as `model(*x)`, a mapping as `model(**x)`.
Whatever the form, the first dimension of every tensor counts inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]

# Inputs that go through a network at once where nothing else sets a limit: large enough for fast
# matrix products, small enough for the activations of a wide convolutional network.
CHUNK = 256


def named_tensors(x: Inputs) -> dict[str, Tensor]:
    """Name the tensors of a batch, for error messages and for walking over them."""
    if isinstance(x, Tensor):
        return {"x": x}
    items = x.items() if isinstance(x, Mapping) else ((f"x[{i}]", t) for i, t in enumerate(x))
    tensors = dict(items)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"input {name} must be a tensor, got {type(tensor).__name__}")
    if not tensors:
        raise ValueError("the input holds no tensors")
    return tensors


def map_inputs(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to every tensor of a batch, keeping its form."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {name: function(tensor) for name, tensor in x.items()}
    return tuple(function(tensor) for tensor in x)


def as_arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and keyword arguments with which a batch is given to a model."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return ((x,) if isinstance(x, Tensor) else tuple(x)), {}


def size(x: Inputs) -> int:
    """Return the number of inputs in a batch, which all its tensors must agree on."""
    tensors = named_tensors(x)
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            raise ValueError(
                f"input {name} is a single number; its first dimension must be the batch"
            )
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the tensors of one batch differ in length: {sizes}")
    return next(iter(sizes.values()))


def take(x: Inputs, index: Tensor | slice | int) -> Inputs:
    """Select inputs of a batch."""
    return map_inputs(x, lambda tensor: tensor[index])


def chunks(x: Inputs, length: int = CHUNK) -> Iterator[Inputs]:
    """Split a batch into consecutive chunks of at most `length` inputs."""
    for start in range(0, size(x), length):
        yield take(x, slice(start, start + length))


def split_labels(batch: Any) -> tuple[Inputs, Tensor | None]:
    """Split what a data loader yields into inputs and labels.

    `(x, y)` and `[x, y]` are inputs and labels, and x may itself be a tuple or mapping;
    `(x1, x2, y)` is a model of two inputs; a mapping has its labels under "labels" or "label", the
    rest are inputs; a bare tensor has no labels.
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        key = next((key for key in ("labels", "label") if key in batch), None)
        inputs = {name: tensor for name, tensor in batch.items() if name != key}
        return inputs, None if key is None else batch[key]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        *inputs_list, labels = batch
        return inputs_list[0] if len(inputs_list) == 1 else tuple(inputs_list), labels
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    raise TypeError(f"a loader must yield tuples, lists, mappings or tensors, got {type(batch)}")
