"""CNML by brute force: train again with the query added, once for every label.

This is what ACNML amortises. It is too slow to predict with, and good for choosing ACNML's alpha on
a few points (`tuning.alpha_matching_cnml`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import checks
from acnml.batches import Inputs, size, split_labels, take
from acnml.classifier import Classifier
from acnml.inference.batches import cross_entropy, over_batches
from acnml.progress import track
from acnml.random import seeded
from acnml.selection import Parameters, parameter_names

MOMENTUM = 0.9


@final
@dataclass(frozen=True)
class Refit:
    """How training is taken up again: by SGD with momentum 0.9, from the trained weights.

    The network stays in eval mode, as ACNML has it: dropout is off and batch norm keeps its
    statistics.

    Args:
        epochs: passes over the training data.
        learning_rate: constant; for the mean loss of a batch.
        seed: of the loader's order, where that comes from torch's global random state; every refit
            then sees the same batches.
    """

    epochs: int = 5
    learning_rate: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")
        checks.require_positive(self.learning_rate, "learning_rate")


class _Training(NamedTuple):
    """The training data and which parameters learn from it."""

    loader: Iterable[Any]
    batch_sizes: list[int]
    names: frozenset[str]

    def share(self, x: Inputs) -> float:
        """Return the factor of a batch's mean loss that makes it unbiased, also if it is small."""
        return size(x) * len(self.batch_sizes) / self.data

    @property
    def data(self) -> int:
        """Return n, the number of data."""
        return sum(self.batch_sizes)


def cnml_log_lik(
    classifier: Classifier,
    loader: Iterable[Any],
    x: Inputs,
    refit: Refit | None = None,
    parameters: Parameters = None,
    progress: bool | None = None,
) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K), where θ̂_y explains the training data and the label y best.

        θ̂_y = argmax_θ log p_θ(y|x) + Σ_i log p_θ(y_i|x_i)

    approximated by a few epochs from the weights that the classifier has. Costs B · K · epochs
    passes over the training data: B = 10 inputs with K = 10 labels train 100 times.

    Args:
        classifier: the trained model, e.g. `classifier.at(posterior.mean)`.
        loader: the training data, with labels.
        x: the inputs to find likelihoods for; their labels are not needed.
        refit: how to train; `Refit()` by default.
        parameters: parameter names or submodules that learn; all of the model's by default.
        progress: show a progress bar; by default in a terminal only.
    """
    prepared, refit = classifier.prepare(x), refit or Refit()
    names = frozenset(parameter_names(classifier.model, parameters))
    with seeded(refit.seed):
        training = _Training(loader, _batch_sizes(loader), names)
    classes = classifier.log_probs(take(prepared, slice(0, 1))).shape[1]
    rows = [(i, y) for i in range(size(prepared)) for y in range(classes)]
    values = [
        _refitted_log_lik(classifier, training, take(prepared, slice(i, i + 1)), y, refit)
        for i, y in track(rows, "refits", progress)
    ]
    return torch.stack(values).view(-1, classes)


def _batch_sizes(loader: Iterable[Any]) -> list[int]:
    sizes = [size(split_labels(batch)[0]) for batch in loader]
    if not sizes:
        raise ValueError("the loader gave no batch; is it empty, or an iterator used up before?")
    return sizes


def _refitted_log_lik(
    classifier: Classifier, training: _Training, one: Inputs, label: int, refit: Refit
) -> Tensor:
    """Train a copy with one input added under this label; return its log-likelihood there."""
    module = classifier.copy_module()
    trained = [p.requires_grad_(n in training.names) for n, p in module.named_parameters()]
    optimizer = torch.optim.SGD(
        [p for p in trained if p.requires_grad], lr=refit.learning_rate, momentum=MOMENTUM
    )
    target = torch.tensor([label])

    def step(x: Inputs, labels: Tensor | None) -> None:
        # Over a pass, these average to (Σ_i loss_i + loss of the query) / n.
        of_data = cross_entropy(classifier.logits_of(module, x), labels)
        of_query = cross_entropy(classifier.logits_of(module, one), target)
        loss = training.share(x) * of_data + of_query / training.data
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with seeded(refit.seed):
        for _ in range(refit.epochs):
            over_batches(classifier, training.loader, step, "", progress=False)
    return _log_lik(classifier, module, one, label)


@torch.no_grad()
def _log_lik(classifier: Classifier, module: nn.Module, one: Inputs, label: int) -> Tensor:
    logits = classifier.logits_of(module, one)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.log_softmax(logits.to(wide), dim=-1)[0, label]
