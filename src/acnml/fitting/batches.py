"""Iterating over a loader's batches; every error names the batch it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from acnml._util import checks
from acnml._util.batches import Inputs, size, split_labels
from acnml._util.progress import track
from acnml.classifier import Classifier

# What to do with a prepared batch and its labels, None where the loader has none.
Step: TypeAlias = Callable[[Inputs, Tensor | None], None]


def over_batches(
    classifier: Classifier,
    loader: Iterable[Any],
    step: Step,
    description: str,
    progress: bool | None,
) -> int:
    """Call `step` for every batch and return the number of data."""
    data = 0
    for index, batch in enumerate(track(loader, description, progress)):
        try:
            x, labels = split_labels(batch)
            x = classifier.prepare(x)
            with torch.enable_grad():
                step(x, None if labels is None else checked_labels(labels, x))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"batch {index}: {error}") from error
        data += size(x)
    return _require_data(data)


def once(check: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    """Return a check that looks at the first batch only."""
    waiting = [check]
    return lambda x: waiting.pop()(x) if waiting else None


def count_data(loader: Iterable[Any]) -> int:
    """Return the number of data that one pass over the loader gives."""
    return _require_data(sum(size(split_labels(batch)[0]) for batch in loader))


def _require_data(data: int) -> int:
    if data == 0:
        raise ValueError("the loader gave no batch; is it empty, or an iterator used up before?")
    return data


def cross_entropy(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return the mean loss of a batch, or say why it has none."""
    if labels is None:
        raise ValueError("it has no labels: yield (x, y), or a mapping with 'labels'")
    require_classes(labels, logits)
    loss = functional.cross_entropy(logits, labels.to(logits.device))
    if not torch.isfinite(loss):
        remedy = "check the model and these inputs, or lower the learning rate"
        checks.require_finite(logits, "the model's logits are", remedy)
        raise ValueError(f"the loss is {loss.item()}: lower the learning rate")
    return loss


def require_classes(labels: Tensor, logits: Tensor) -> None:
    """Refuse labels outside the classes that the model has."""
    classes = logits.shape[-1]
    bad = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"label {int(labels[bad[0]])} at index {int(bad[0])} is outside the model's "
            f"{classes} classes"
        )


def checked_labels(labels: Any, x: Inputs) -> Tensor:
    """Return labels as int64 (B,), or say what is wrong with them."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be a tensor of integers, got {kind}")
    if labels.shape != (size(x),):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected ({size(x)},)")
    # Tensors made in inference mode could not take part in gradients; their clones can.
    return (labels.clone() if labels.is_inference() else labels).long()
