"""Batches of inputs: a tensor, a tuple of tensors, or a mapping of tensors.

A tensor is passed to the model as `model(x)`, a tuple or list as `model(*x)` and a mapping as
`model(**x)`. In every form, the first dimension of each tensor is the batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]

# Where a mapping has its labels.
LABELS = ("labels", "label")

# Default number of inputs per forward pass. It is large enough for fast matrix products and small
# enough for the activations of a wide convolutional network to fit in memory.
CHUNK = 256


def named_tensors(x: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a batch by name."""
    if isinstance(x, Tensor):
        require_plain(x, "input x")
        return {"x": x}
    if not isinstance(x, (tuple, list, Mapping)):
        raise TypeError(
            f"inputs must be a tensor, a tuple or a mapping of tensors, got {type(x).__name__}"
        )
    items = x.items() if isinstance(x, Mapping) else ((f"x[{i}]", t) for i, t in enumerate(x))
    tensors = dict(items)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"input {name} must be a tensor, got {type(tensor).__name__}")
        require_plain(tensor, f"input {name}")
    if not tensors:
        raise ValueError("the batch contains no tensors: pass at least one")
    return tensors


def require_plain(tensor: Tensor, what: str) -> None:
    """Raise an error for kinds of tensors that rows cannot be taken from, and say what to pass."""
    if tensor.is_nested:
        kind, remedy = "nested", "pad it to one length: torch.nested.to_padded_tensor(x, 0.0)"
    elif tensor.layout != torch.strided:
        kind, remedy = f"sparse ({tensor.layout})", "pass x.to_dense()"
    elif tensor.is_meta:
        kind, remedy = "on the meta device and has no values", "pass the data itself"
    elif tensor.is_quantized:
        kind, remedy = f"quantised ({tensor.dtype})", "pass x.dequantize()"
    elif tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        kind, remedy = f"of type {tensor.dtype}", "pass x.float()"
    else:
        return
    raise TypeError(f"{what} is {kind}, which is not supported; {remedy}")


def map_inputs(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to every tensor of a batch; lists become tuples."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {name: function(tensor) for name, tensor in x.items()}
    return tuple(function(tensor) for tensor in x)


def as_arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and keyword arguments that pass a batch to a model."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return ((x,) if isinstance(x, Tensor) else tuple(x)), {}


def size(x: Inputs) -> int:
    """Return the number of inputs in a batch, which must be the same for all its tensors."""
    tensors = named_tensors(x)
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            raise ValueError(
                f"input {name} is a scalar tensor; its first dimension must be the batch"
            )
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the tensors of one batch differ in length: {sizes}; "
            "the first dimension of each must be the batch"
        )
    return next(iter(sizes.values()))


def take(x: Inputs, index: Tensor | slice | int) -> Inputs:
    """Select inputs of a batch."""
    return map_inputs(x, lambda tensor: tensor[index])


def chunks(x: Inputs, length: int = CHUNK) -> Iterator[Inputs]:
    """Split a batch into consecutive chunks of at most `length` inputs."""
    for start in range(0, size(x), length):
        yield take(x, slice(start, start + length))


def without_labels(x: Inputs) -> Inputs:
    """Return a mapping without its labels, and every other batch as it is."""
    if not isinstance(x, Mapping):
        return x
    key = next((key for key in LABELS if key in x), None)
    return {name: tensor for name, tensor in x.items() if name != key}


def split_labels(batch: Any) -> tuple[Inputs, Tensor | None]:
    """Split an item of a data loader into inputs and labels.

    - `(x, y)` and `[x, y]` are inputs and labels, where x may be a tensor, a tuple or a mapping.
    - `(x1, x2, y)` is for a model with two inputs.
    - A mapping has its labels under "labels" or "label". All other entries are inputs.
    - A tensor and `(x,)` are inputs without labels.
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        key = next((key for key in LABELS if key in batch), None)
        return without_labels(batch), None if key is None else batch[key]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        *inputs_list, labels = batch
        return inputs_list[0] if len(inputs_list) == 1 else tuple(inputs_list), labels
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    raise TypeError(f"a loader must yield tuples, lists, mappings or tensors, got {type(batch)}")
