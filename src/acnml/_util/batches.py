"""Batches of inputs: a tensor, a tuple of tensors, or a mapping of tensors.

A tensor is passed to the model as `model(x)`, a tuple or list as `model(*x)` and a mapping as
`model(**x)`. In every form, the first dimension of each tensor is the batch dimension.

Predictors, fits and most other public functions take NumPy arrays in place of tensors. They turn
them into tensors first: by `split_labels`, `as_loader` and `arrays_for_arrays`, or directly by
`as_inputs` and `as_tensor`. Inside, there are only tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from acnml._util import checks
from acnml._util.arrays import as_tensor
from acnml._util.messages import track

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]

# Where a mapping has its labels.
LABELS = ("labels", "label")
NO_LABELS = (
    "there are no labels: yield (x, y) with one class index per input (y.argmax(1) of one-hot "
    "labels), or a mapping with 'labels'"
)
NO_BATCH = (
    "the loader gave no batch: it is empty, or it is an iterator that was used before; "
    "pass a loader that can be iterated again"
)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Default number of inputs per forward pass. It is large enough for fast matrix products and small
# enough for the activations of a wide convolutional network to fit in memory.
CHUNK = 256


def named_tensors(x: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a batch by name."""
    if isinstance(x, Tensor):
        return {"x": x}
    if not isinstance(x, (tuple, list, Mapping)):
        raise TypeError(f"inputs must be a tensor, a tuple or a mapping of tensors, got {_kind(x)}")
    items = x.items() if isinstance(x, Mapping) else ((f"x[{i}]", t) for i, t in enumerate(x))
    tensors = dict(items)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"input {name} must be a tensor, got {type(tensor).__name__}")
    if not tensors:
        raise ValueError("the batch contains no tensors: pass at least one")
    return tensors


def map_inputs(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to every tensor of a batch; lists become tuples."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {name: function(tensor) for name, tensor in x.items()}
    return tuple(function(tensor) for tensor in x)


def broken_rows(x: Inputs) -> Tensor:
    """Return which inputs (B,) have numbers that are not finite.

    Beside other tensors -inf counts as finite: additive attention masks contain it.
    """
    tensors = [t for t in named_tensors(x).values() if t.is_floating_point()]
    if isinstance(x, Tensor):
        found = [~t.isfinite() for t in tensors]
    else:
        found = [t.isnan() | (t == torch.inf) for t in tensors]
    first = next(iter(named_tensors(x).values()))
    broken = torch.zeros_like(first.reshape(first.shape[0], -1)[:, 0], dtype=torch.bool)
    for each in found:
        broken = broken | each.reshape(each.shape[0], -1).any(1)
    return broken


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
    return {name: tensor for name, tensor in x.items() if name not in LABELS}


def split_labels(batch: Any) -> tuple[Inputs, Tensor | None]:
    """Split an item of a data loader into inputs and labels; arrays become tensors.

    - `(x, y)` and `[x, y]` are inputs and labels, where x may be a tensor, a tuple or a mapping.
    - `(x1, x2, y)` is for a model with two inputs.
    - A mapping has its labels under "labels" or "label"; if it has both, those under "labels" are
      taken. All other entries are inputs.
    - A tensor and `(x,)` are inputs without labels.
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return as_inputs(batch), None
    if isinstance(batch, Mapping):
        key = next((key for key in LABELS if key in batch), None)
        labels = None if key is None else as_tensor(batch[key], "labels")
        return as_inputs(without_labels(batch)), labels
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        *inputs_list, labels = batch
        given = inputs_list[0] if len(inputs_list) == 1 else tuple(inputs_list)
        return as_inputs(given), as_tensor(labels, "labels")
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return as_inputs(batch[0]), None
    raise TypeError(f"a loader must yield tuples, lists, mappings or tensors, got {type(batch)}")


# Data sets in place of loaders -------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class WholeData:
    """A data set in memory that is iterated in batches, in its order."""

    inputs: Inputs
    labels: Tensor | None

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-size(self.inputs) // CHUNK)

    def __iter__(self) -> Iterator[tuple[Inputs, ...]]:
        """Yield (inputs, labels), or (inputs,) if there are no labels."""
        for start in range(0, size(self.inputs), CHUNK):
            rows = slice(start, start + CHUNK)
            some = take(self.inputs, rows)
            yield (some,) if self.labels is None else (some, self.labels[rows])


def as_loader(data: Any) -> Iterable[Any]:
    """Return the batches of a data set `(X, y)` or `X`; a loader is returned as it is.

    A *tuple* of two is a data set, unless both elements are batches: `((x1, y1), (x2, y2))` is a
    loader. X is what a model takes: a tensor, an array, or a tuple or mapping of them. y is a
    vector of class indices, one per input. A single tensor or array is a data set without labels.
    Everything else is a loader, also every *list*: `[(X, y)]` is a loader with one batch.
    """
    if isinstance(data, (Tensor, np.ndarray)):
        return WholeData(as_inputs(data), None)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        kind = type(data).__name__
        raise TypeError(f"{kind} yields single examples: pass DataLoader(dataset, batch_size=256)")
    if not isinstance(data, tuple) or len(data) != 2 or all(map(_is_batch, data)):
        return cast(Iterable[Any], data)
    x, labels = data
    inputs = as_inputs(x)
    length = size(inputs)
    _require_labels(labels)
    if length != len(labels):
        raise ValueError(
            f"X has {length} inputs, but y has {len(labels)} labels: pass one label per input"
        )
    return WholeData(inputs, as_tensor(labels, "labels"))


def _is_batch(value: Any) -> bool:
    """Whether a value is a batch of a loader, and neither the inputs nor the labels of all data."""
    if isinstance(value, (tuple, list)):
        return any(isinstance(part, (Tensor, np.ndarray)) for part in value)
    return isinstance(value, Mapping)


def _require_labels(labels: Any) -> None:
    """Raise an error if the labels of a data set are no array."""
    if isinstance(labels, (Tensor, np.ndarray)) and labels.ndim > 0:
        return
    raise TypeError(
        f"y must be a vector of class indices, got {_kind(labels)}; "
        "without labels, pass X in place of (X, None)"
    )


def _kind(value: Any) -> str:
    """Name what was given in place of a tensor, and say how to convert it."""
    how = "its to_numpy()" if hasattr(value, "to_numpy") else "torch.as_tensor of it"
    return f"a {type(value).__name__}: pass {how}"


# Passes over data; errors say where they come from ----------------------------------------------


def each_batch(
    loader: Iterable[Any], use: Callable[[Any], None], description: str, progress: bool | None
) -> None:
    """Call a function with every batch of a loader, or of a data set as in `as_loader`.

    Errors about a batch are raised again with its index. For a data set in memory, the library
    makes the batches, so they name the rows of the data set. See `track` for the last arguments.
    """
    data, is_empty = as_loader(loader), True
    for index, batch in enumerate(track(data, description, progress)):
        is_empty = False
        try:
            use(batch)
        except (TypeError, ValueError) as error:
            raise _located(error, data, index) from error
    if is_empty:
        raise ValueError(NO_BATCH)


def _located(error: Exception, data: Iterable[Any], index: int) -> Exception:
    """Return the error of a batch for those who know only the loader or the data set."""
    where = f"batch {index}"
    if isinstance(data, WholeData):
        start, total = index * CHUNK, size(data.inputs)
        if isinstance(error, checks.RowsError) and error.rows:
            return error.moved(start, total)
        where = f"rows {start} to {min(start + CHUNK, total) - 1}"
    if isinstance(error, checks.RowsError):
        return error.named(where)
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")


def in_chunks(
    x: Inputs,
    use: Callable[[Inputs], T],
    length: int = CHUNK,
    within: Callable[[Inputs], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[T]:
    """Yield the results of a function for the chunks of a prepared batch, of at most this length.

    Each is computed in a context of its own, such as `Classifier.threads_for`. Errors about single
    inputs name them by their index in the batch, not in the chunk.
    """
    total = size(x)
    for start in range(0, max(1, total), length):
        chunk = x if total <= length else take(x, slice(start, start + length))
        with within(chunk), checks.counting_from(start, total):
            found = use(chunk)
        yield found


# NumPy arrays ------------------------------------------------------------------------------------


def arrays_for_arrays(method: F) -> F:
    """Decorate a method of inputs so that it also takes arrays, and then returns arrays.

    The inputs are the first argument of the method. What it returns beside tensors is kept.
    """

    @functools.wraps(method)
    def wrapper(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_arrays_only(x):
            return method(self, x, *args, **kwargs)
        found = method(self, as_inputs(x), *args, **kwargs)
        return found.cpu().numpy() if isinstance(found, Tensor) else found

    return cast(F, wrapper)


def has_arrays_only(x: Any) -> bool:
    """Whether a batch consists of arrays."""
    if isinstance(x, (tuple, list, Mapping)):
        parts = list(x.values() if isinstance(x, Mapping) else x)
        return bool(parts) and all(isinstance(part, np.ndarray) for part in parts)
    return isinstance(x, np.ndarray)


def as_inputs(x: Any) -> Inputs:
    """Turn the arrays of a batch into tensors."""
    if isinstance(x, Mapping):
        return {name: as_tensor(part, f"input {name}") for name, part in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(as_tensor(part, f"input x[{i}]") for i, part in enumerate(x))
    return cast(Inputs, as_tensor(x, "input x"))
