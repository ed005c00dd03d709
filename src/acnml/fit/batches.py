"""Go over labelled data: checked labels, and the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from acnml._util import checks
from acnml._util.batches import (
    NO_LABELS,
    Inputs,
    WholeData,
    as_loader,
    each_batch,
    size,
    split_labels,
)
from acnml.classifier import Classifier

# A function of a prepared batch and its labels, which are None if the loader yields none.
Step: TypeAlias = Callable[[Inputs, Tensor | None], None]


def over_batches(
    classifier: Classifier,
    loader: Iterable[Any],
    step: Step,
    description: str,
    progress: bool | None,
) -> None:
    """Call `step` for every batch."""

    def use(batch: Any) -> None:
        x, labels = split_labels(batch)
        with torch.enable_grad(), classifier.threads_for(x):
            x = classifier.prepare(x)
            step(x, None if labels is None else checked_labels(labels, x))

    each_batch(loader, use, description, progress)


def require_loader(data: Any, what: str) -> None:
    """Raise an error if training by SGD is given a data set in place of a loader."""
    if isinstance(as_loader(data), WholeData):
        raise TypeError(
            f"{what} trains by SGD, so the size and the order of batches matter: pass "
            "DataLoader(TensorDataset(X, y), batch_size=..., shuffle=True) in place of (X, y)"
        )


def batch_sizes(loader: Iterable[Any]) -> list[int]:
    """Return the number of inputs in every batch, from one pass over the loader."""
    sizes: list[int] = []

    def count(batch: Any) -> None:
        sizes.append(size(split_labels(batch)[0]))

    each_batch(loader, count, "", progress=False)
    if not sum(sizes):
        raise ValueError("all batches of the loader are empty")
    return sizes


def cross_entropy(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return the mean cross-entropy of a batch, or raise an error if it is not finite."""
    if labels is None:
        raise ValueError(NO_LABELS)
    require_classes(labels, logits)
    loss = functional.cross_entropy(logits, labels.to(logits.device))
    if not torch.isfinite(loss):
        remedy = "check the model and these inputs, or lower the learning rate"
        checks.require_finite(logits, "the model's logits are", remedy)
        raise ValueError(f"the loss is {loss.item()}: lower the learning rate")
    return loss


def require_classes(labels: Tensor, logits: Tensor) -> None:
    """Raise an error if a label is not a class of the model."""
    classes = logits.shape[-1]
    bad = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(bad):
        raise checks.RowsError(
            f"label {int(labels[bad[0]])} is outside the model's {classes} classes",
            bad.tolist(),
            len(labels),
            "drop or relabel these examples",
        )


def checked_labels(labels: Any, x: Inputs) -> Tensor:
    """Check labels and return them as int64 (B,)."""
    if isinstance(labels, Tensor) and labels.shape != (size(x),):
        remedy = "one class index per input"
        if labels.ndim == 2:
            remedy = "y[:, 0]" if labels.shape[1] == 1 else "y.argmax(1) of one-hot labels"
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected ({size(x)},): pass {remedy}; for "
            "two batches without labels, such as X.split(100), pass a list of them"
        )
    kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels must be a tensor of integers, got {kind}: pass class indices, for example "
            "labels.long()"
        )
    # Autograd cannot use tensors created in inference mode, but it can use their clones.
    return (labels.clone() if labels.is_inference() else labels).long()
