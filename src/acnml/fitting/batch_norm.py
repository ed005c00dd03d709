"""Recompute batch-norm statistics, for weights other than the trained ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from acnml._util.batches import as_arguments, as_loader, split_labels
from acnml._util.params import Params
from acnml.classifier import Classifier, require_classifier


@torch.no_grad()
def batch_norm_statistics(
    classifier: Classifier, loader: Iterable[Any], tensors: Params | None = None
) -> Params:
    """Compute the running means and variances in one pass over the loader, by name.

    They are the unweighted average over batches. Only batch-norm layers run in training mode, so
    dropout is off. Use the result as `classifier.at(statistics)`. It is empty for a model without
    batch norm.

    Args:
        classifier: the model.
        loader: the training data; labels are ignored.
        tensors: weights to use in place of the model's own, e.g. the mean of a `Swag`.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    >>> classifier = acnml.Classifier(model)
    >>> statistics = acnml.batch_norm_statistics(classifier, [torch.randn(50, 4) + 2])
    >>> refreshed = classifier.at(statistics)  # the model itself is not changed
    >>> bool(statistics["0.running_mean"].mean() > 1)
    True
    """
    require_classifier(classifier)
    module = classifier.copy_module(tensors)
    layers = {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}
    tracking = {name: layer for name, layer in layers.items() if layer.track_running_stats}
    if not tracking:
        return {}
    for layer in tracking.values():
        layer.reset_running_stats()
        layer.momentum = None  # an average over all batches instead of a moving average
        layer.train()
    _run_through(classifier, module, loader)
    return _statistics(tracking)


def _run_through(classifier: Classifier, module: nn.Module, loader: Iterable[Any]) -> None:
    empty = True
    for batch in as_loader(loader):
        args, kwargs = as_arguments(classifier.prepare(split_labels(batch)[0]))
        module(*args, **kwargs)
        empty = False
    if empty:
        raise ValueError("the loader gave no batch: pass a loader that can be iterated again")


def _statistics(layers: dict[str, _BatchNorm]) -> Params:
    return {
        f"{name}.{buffer}" if name else buffer: tensor
        for name, layer in layers.items()
        for buffer, tensor in layer.named_buffers(recurse=False)
        if buffer != "num_batches_tracked"
    }
