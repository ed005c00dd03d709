"""SWAG: a Gaussian fitted to the weights that SGD visits (Maddox et al. 2019)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml._util import checks
from acnml._util.batches import Inputs
from acnml._util.params import Params, add, scale, subtract, widened, zip_with
from acnml._util.seeding import seeded
from acnml._util.selection import Parameters, listed, parameter_names
from acnml._util.structure import unwrapped
from acnml.classifier import Classifier, require_classifier
from acnml.fitting.batches import cross_entropy, over_batches
from acnml.posteriors import Diagonal, LowRank

MOMENTUM = 0.9


@final
class Swag:
    """Collects the weights of a model in training; any training loop can call `update(model)`.

    Kept are the running mean and variance of the weights and their last `rank` deviations from the
    running mean. The mean is SWA; with batch norm its statistics must be renewed before use:
    `classifier.at({**swag.mean, **batch_norm_statistics(classifier, loader, swag.mean)})`.

    Args:
        rank: number of deviations to keep; 20 in the SWAG paper.
        parameters: parameters, their names or submodules to cover; all of the model's by default.

    >>> swag = Swag(rank=2)
    >>> model = nn.Linear(4, 3)
    >>> for _ in range(3):  # once an epoch, say
    ...     swag.update(model)
    >>> swag.low_rank()
    LowRank(15 parameters: weight … bias)
    """

    def __init__(self, rank: int = 20, parameters: Parameters = None) -> None:
        if rank < 2:
            raise ValueError(f"rank must be at least 2, got {rank}; SWAG-D is `diagonal()`")
        self.updates = 0
        self.mean: Params = {}
        self._parameters = listed(parameters)
        self._squares: Params = {}  # Σ (θ - mean)², by Welford's rule: stable
        self._deviations: deque[Params] = deque(maxlen=rank)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the model's present weights."""
        weights = self._weights(model)
        if self.updates == 0:
            self.mean = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            self._squares = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        checks.require_fits(self.mean, weights)
        self.updates += 1
        before = subtract(weights, self.mean)
        self.mean = add(self.mean, scale(before, 1 / self.updates))
        after = subtract(weights, self.mean)
        self._squares = add(self._squares, zip_with(torch.mul, before, after))
        self._deviations.append(after)

    def diagonal(self) -> Diagonal:
        """Return SWAG-D: N(mean, diag(variance of the weights))."""
        return Diagonal(self.mean, self._var())

    def low_rank(self) -> LowRank:
        """Return SWAG: N(mean, ½ diag(variance) + ½ D Dᵀ / (r - 1)), D the last r deviations."""
        var, deviations = self._var(), list(self._deviations)
        share = 1 / math.sqrt(2 * (len(deviations) - 1))
        directions = {n: share * torch.stack([d[n] for d in deviations]) for n in self.mean}
        return LowRank(self.mean, scale(var, 0.5), directions)

    def _weights(self, model: nn.Module) -> Params:
        model = unwrapped(model)
        names = set(parameter_names(model, self._parameters))
        return widened({n: p.detach() for n, p in model.named_parameters() if n in names})

    def _var(self) -> Params:
        if self.updates < 2:
            raise ValueError(
                f"SWAG needs at least 2 updates to have a variance, got {self.updates}"
            )
        return {n: (s / self.updates).clamp(min=0) for n, s in self._squares.items()}


def fit_swag(
    classifier: Classifier,
    loader: Iterable[Any],
    epochs: int = 20,
    learning_rate: float = 0.01,
    rank: int = 20,
    seed: int = 0,
    parameters: Parameters = None,
    progress: bool | None = None,
) -> LowRank:
    """Run SGD at a constant learning rate on a copy of the model and return SWAG.

    For SWAG-D take `collect_swag(...).diagonal()`.

    Args:
        classifier: the trained model, where SGD starts.
        loader: the training data, with labels.
        epochs: passes over the data; the weights are collected after each.
        learning_rate: of SGD with momentum 0.9; large enough to leave the minimum it starts in.
        rank: number of deviations to keep.
        seed: of dropout, and of the loader's order where that comes from torch's global state.
        parameters: parameters, their names or submodules to train and cover; all by default,
            also those that require no gradient in the user's model.
        progress: show a progress bar; by default in a terminal only.
    """
    swag = collect_swag(classifier, loader, epochs, learning_rate, rank, seed, parameters, progress)
    return swag.low_rank()


@torch.inference_mode(False)
def collect_swag(
    classifier: Classifier,
    loader: Iterable[Any],
    epochs: int = 20,
    learning_rate: float = 0.01,
    rank: int = 20,
    seed: int = 0,
    parameters: Parameters = None,
    progress: bool | None = None,
) -> Swag:
    """Run SGD on a copy of the model, collecting its weights after every epoch; see `fit_swag`."""
    require_classifier(classifier)
    if epochs < 2:
        raise ValueError(f"SWAG needs at least 2 epochs to have a variance, got {epochs}")
    module = classifier.copy_module()
    names = set(parameter_names(classifier.model, parameters))
    trained = [p.requires_grad_(name in names) for name, p in module.named_parameters()]
    optimizer = torch.optim.SGD(
        [p for p in trained if p.requires_grad], lr=learning_rate, momentum=MOMENTUM
    )
    swag = Swag(rank, sorted(names))

    def step(x: Inputs, labels: Tensor | None) -> None:
        loss = cross_entropy(classifier.logits_of(module, x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with seeded(seed):
        for epoch in range(epochs):
            module.train()
            over_batches(classifier, loader, step, f"epoch {epoch + 1}/{epochs}", progress)
            swag.update(module)
    return swag
