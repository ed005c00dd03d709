"""Recompute batch-norm statistics, for weights other than the trained ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from acnml._util.batches import WholeData, as_loader, each_batch, in_chunks, split_labels, take
from acnml._util.params import Params
from acnml._util.structure import tracking_batch_norms
from acnml.classifier import Classifier, as_classifier


@torch.no_grad()
def batch_norm_statistics(
    model: nn.Module | Classifier, loader: Iterable[Any], tensors: Params | None = None
) -> Params:
    """Compute the running means and variances in one pass over the loader, by name.

    They are averages of the mean and the variance of every batch, weighted by the size of the
    batch, as in the code of SWAG (Maddox et al. 2019) and, for batches of equal size, in torch's
    `update_bn`. Every batch is normalised by itself, as in training, so a loader should shuffle:
    the variance within batches of one class is not that of the data. Data in memory, which may be
    sorted, are read in batches of at most 256 rows from all over the data.

    Only batch-norm layers run in training mode, so dropout is off. The result is empty for a model
    without batch norm.

    Args:
        model: the network.
        loader: the training data; labels are ignored.
        tensors: weights to use in place of the model's own, e.g. the mean of a `Swag`.

    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    >>> statistics = acnml.fit.batch_norm_statistics(model, torch.randn(50, 4))
    >>> refreshed = acnml.Classifier(model).at(statistics)  # the model itself is not changed
    """
    classifier = as_classifier(model)
    module = classifier.at(tensors or {}).copy_module()
    layers = tracking_batch_norms(module)
    if not layers:
        return {}
    for layer in layers.values():
        layer.reset_running_stats()
        layer.register_forward_pre_hook(_weighting(), with_kwargs=True)
        layer.train()

    def run(batch: Any) -> None:
        classifier.logits_of(module, classifier.prepare(split_labels(batch)[0]))

    each_batch(_spread(classifier, loader), run, "batch norm", progress=False)
    return {
        f"{name}.{buffer}" if name else buffer: tensor
        for name, layer in layers.items()
        for buffer, tensor in layer.named_buffers(recurse=False)
        if buffer != "num_batches_tracked"
    }


def _weighting() -> Callable[..., None]:
    """Return a forward pre-hook that makes a layer's running statistics averages over all it sees.

    A layer's new statistics are (1 - momentum) old + momentum batch. With the momentum n / N, where
    n is the number of values per channel in this batch and N that of all so far, they are averages
    with the weights n.
    """
    seen = 0

    def hook(layer: _BatchNorm, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        nonlocal seen
        (x,) = args or kwargs.values()
        values = x.numel() // x.shape[1]
        seen += values
        layer.momentum = values / seen

    return hook


def _spread(classifier: Classifier, loader: Iterable[Any]) -> Iterable[Any]:
    """Return batches of almost equal size from all over the data, if they are in memory."""
    data = as_loader(loader)
    if not isinstance(data, WholeData):
        return data
    # Inputs are checked in their own order first, so that errors name rows of the data.
    for _ in in_chunks(data.inputs, classifier.prepare):
        pass
    return ((take(data.inputs, slice(start, None, len(data))),) for start in range(len(data)))
