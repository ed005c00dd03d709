"""CNML by brute force: train again with the query added, once for every label.

With n training data, the weights that explain them and the label y of the query x best are

    θ̂_y = argmin_θ F_y(θ),   F_y(θ) = (Σ_i -log p_θ(y_i|x_i) - log p_θ(y|x)) / n + w/2 ‖θ‖²,

approximated by some epochs of SGD from the weights that the model has. Without weight decay w this
is CNML, with it CNMAP (section 2 of the paper). ACNML amortises it.

A row is one label of one query. Every row has weights of its own and sees the same batches, so that
many rows train together, and what only frozen weights see of a batch is computed once for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional

from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import budget
from acnml._util.params import Params, map_tensors, zip_with
from acnml._util.progress import track
from acnml._util.seeding import seeded
from acnml._util.selection import Parameters, parameter_names
from acnml.classifier import Classifier
from acnml.fitting.batches import over_batches, require_classes

# What a row holds at once: weights, velocity, the gradients of the data's and of the query's loss
# and their sum; activations as autograd keeps them, gradients by them, and what an operation needs.
COPIES_OF_WEIGHTS = 5
COPIES_OF_ACTIVATIONS = 3

# (θ, query, label) of a row -> tensors.
RowFunction: TypeAlias = Callable[[Params, Inputs, Tensor], Any]


@final
@dataclass(frozen=True)
class Refit:
    """How training is taken up again: by SGD with momentum, at a constant learning rate.

    The network stays in eval mode, as ACNML has it: dropout is off and batch norm keeps its
    statistics.

    Args:
        epochs: passes over the training data.
        learning_rate: for the mean loss of the data.
        momentum: of SGD; 0 is plain SGD.
        weight_decay: w/2 ‖θ‖² is added to the mean loss, as in `torch.optim.SGD`; with n data it
            stands for the prior N(0, 1/(n w) I) of CNMAP. Give what the model was trained with.
        seed: of the loader's order, where that comes from torch's global random state; every row
            then sees the same batches.
        memory: bytes that the rows trained at once may take; a share of what is free by default.
            1 trains them one by one, without `torch.func.vmap`.
    """

    epochs: int = 5
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")
        checks.require_positive(self.learning_rate, "learning_rate")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay must be finite and not negative: {self.weight_decay}")


class Refitted(NamedTuple):
    """log p_θ(y|x) for every label y, each with the weights θ that were trained on this label."""

    last: Tensor  # at the end of training
    best: Tensor  # the highest after any step of the last epoch


@torch.inference_mode(False)
def refit_each(
    classifier: Classifier,
    loader: Iterable[Any],
    x: Inputs,
    refit: Refit,
    parameters: Parameters = None,
    progress: bool | None = None,
) -> Iterator[Refitted]:
    """Yield the refitted log-likelihoods (K,) of one input after the other.

    Inputs train in blocks that fit into memory, each when its first result is asked for. A result
    depends, but for rounding, on its input alone.

    Args:
        classifier: the trained model, e.g. `classifier.at(posterior.mean)`.
        loader: the training data, with labels; gone through once more to count it.
        x: the queries, without labels.
        refit: how to train.
        parameters: parameters, their names or submodules that learn; all of the model's by default.
        progress: show progress bars; by default in a terminal only.
    """
    queries = classifier.prepare(x)
    log_probs = _finite_log_probs(classifier, queries)
    names = parameter_names(classifier.model, parameters)
    with seeded(refit.seed):
        training = _Training(classifier, loader, names, refit, _batch_sizes(loader), progress)
    labels = torch.arange(log_probs.shape[1], device=log_probs.device)
    rows = training.rows_at_once(batches.take(queries, slice(0, 1)), labels)
    blocks = list(batches.chunks(queries, max(1, rows // len(labels))))
    each = (training.run(block, labels, rows) for block in track(blocks, "queries", progress))
    return (Refitted(*one) for block in each for one in zip(*block, strict=True))


@torch.no_grad()
def _finite_log_probs(classifier: Classifier, queries: Inputs) -> Tensor:
    log_probs = torch.cat([classifier.log_probs(block) for block in batches.chunks(queries)])
    remedy = "check the model and these inputs"
    return checks.require_finite(log_probs, "the model's log-probabilities are", remedy)


def _batch_sizes(loader: Iterable[Any]) -> list[int]:
    sizes = [batches.size(batches.split_labels(batch)[0]) for batch in loader]
    if not sum(sizes):
        raise ValueError("the loader gave no batch; is it empty, or an iterator used up before?")
    return sizes


@final
@dataclass(frozen=True)
class _Training:
    """The model, the training data and how rows learn from them."""

    classifier: Classifier
    loader: Iterable[Any]
    names: list[str]
    refit: Refit
    batch_sizes: list[int]
    progress: bool | None

    @torch.inference_mode(False)
    def rows_at_once(self, one: Inputs, labels: Tensor) -> int:
        """Return how many rows fit into memory; 1 also where `vmap` does not know the model."""
        start = self._start()
        if not self.classifier.gradient(one, start):
            raise ValueError(
                f"the model's logits use none of the parameters {self.names}; "
                "name some that the forward pass uses"
            )
        weights = sum(tensor.nbytes for tensor in start.values())
        activations = max(self.batch_sizes) * _activation_bytes(self.classifier, start, one)
        row = COPIES_OF_WEIGHTS * weights + COPIES_OF_ACTIVATIONS * activations
        rows = budget(labels.device, self.refit.memory) // row
        return rows if rows > 1 and self._can_vectorise(one, labels[:2]) else 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self, queries: Inputs, labels: Tensor, rows: int) -> Refitted:
        """Train all labels of the queries, so many rows at once; return (Q, K) each."""
        kind = _ManyRows if rows > 1 else _OneRow
        parts = [self._train(kind(self._start(), queries, some)) for some in labels.split(rows)]
        return Refitted(*(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)))

    def _start(self) -> Params:
        return self.classifier.copy_parameters(self.names)

    def _train(self, rows: _Rows) -> Refitted:
        """Train (Q, L) rows and return their log-likelihoods."""
        before_steps: list[Tensor] = []
        with seeded(self.refit.seed):
            for epoch in range(self.refit.epochs):
                before_steps = self._epoch(rows, f"epoch {epoch + 1}/{self.refit.epochs}")
        last = rows.evaluate(self._log_lik)
        checks.require_finite(last, "log-likelihoods are", "lower the learning rate")
        return Refitted(last, torch.stack([*before_steps[1:], last]).amax(0))

    def _epoch(self, rows: _Rows, description: str) -> list[Tensor]:
        """Go over the data once and return the log-likelihoods (Q, L) before every step."""
        seen: list[Tensor] = []

        def step(x: Inputs, y: Tensor | None) -> None:
            gradient, (loss, log_lik) = rows.evaluate(self._gradient(x, y))
            if not torch.isfinite(loss).all():
                remedy = "lower the learning rate, or check the model on this batch"
                raise ValueError(f"the loss is NaN or infinite: {remedy}")
            seen.append(log_lik)
            rows.descend(gradient, self.refit)

        over_batches(self.classifier, self.loader, step, description, self.progress)
        return seen

    def _gradient(self, x: Inputs, y: Tensor | None) -> RowFunction:
        """Return (gradient, (loss, log p_θ(label|query))) of a row on this batch.

        Over the batches of a pass, also if some are small, the losses average to F but for the
        weight decay.
        """
        if y is None:
            raise ValueError("it has no labels: yield (x, y), or a mapping with 'labels'")
        data = sum(self.batch_sizes)
        share = batches.size(x) * len(self.batch_sizes) / data

        def loss(theta: Params, query: Inputs, label: Tensor) -> tuple[Tensor, Tensor]:
            log_probs = self.classifier.log_probs(x, theta)
            require_classes(y, log_probs)
            of_data = functional.nll_loss(log_probs, y.to(log_probs.device))
            log_lik = self._log_lik(theta, query, label)
            return share * of_data - log_lik / data, log_lik

        return grad_and_value(loss, has_aux=True)

    def _log_lik(self, theta: Params, query: Inputs, label: Tensor) -> Tensor:
        """Return log p_θ(label|query) of a row."""
        one = batches.map_inputs(query, lambda tensor: tensor.unsqueeze(0))
        return self.classifier.log_probs(one, theta)[0].gather(0, label.unsqueeze(0)).squeeze(0)

    @torch.no_grad()
    def _can_vectorise(self, one: Inputs, labels: Tensor) -> bool:
        """Try, with the query in the place of the data: the model has run without `vmap`."""
        rows = _ManyRows(self._start(), one, labels)
        try:
            rows.evaluate(self._gradient(one, labels[:1]))
            rows.evaluate(self._log_lik)  # without gradients some models take another way
        except (RuntimeError, ValueError):
            return False
        return True


class _Rows(ABC):
    """Some labels (L,) of some queries (Q, ...) in training, each row with weights of its own."""

    def __init__(self, start: Params, queries: Inputs, labels: Tensor) -> None:
        rows = (batches.size(queries), len(labels))
        self.theta = {name: t.expand(*rows, *t.shape).clone() for name, t in start.items()}
        self.velocity = zip_with(torch.zeros_like, self.theta)
        self.queries, self.labels = queries, labels

    @abstractmethod
    def evaluate(self, function: RowFunction) -> Any:
        """Return what the function returns, with (Q, L) in front of every tensor."""

    @final
    def descend(self, gradient: Params, refit: Refit) -> None:
        """Take the step of `torch.optim.SGD`, in place."""
        for name, point in self.theta.items():
            velocity = self.velocity[name].mul_(refit.momentum).add_(gradient[name])
            velocity.add_(point, alpha=refit.weight_decay)
            point.sub_(velocity, alpha=refit.learning_rate)


@final
class _ManyRows(_Rows):
    """Rows in one computation; the inner `vmap` shares what the labels of a query share."""

    def evaluate(self, function: RowFunction) -> Any:
        over_labels = vmap(function, in_dims=(0, None, 0))
        over_queries = vmap(over_labels, in_dims=(0, 0, None))
        return over_queries(self.theta, self.queries, self.labels)


@final
class _OneRow(_Rows):
    """One label of one query, without `vmap`."""

    def evaluate(self, function: RowFunction) -> Any:
        theta = {name: tensor[0, 0] for name, tensor in self.theta.items()}
        result = function(theta, batches.take(self.queries, 0), self.labels[0])
        return map_tensors(result, lambda tensor: tensor[None, None])


def _activation_bytes(classifier: Classifier, params: Params, one: Inputs) -> int:
    """Return the bytes that autograd keeps of one input to find gradients by the parameters.

    Only what depends on the parameters: rows share the rest.
    """
    kept: dict[int, int] = {}  # by address, because several operations may keep the same tensor

    def keep(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        classifier.log_probs(one, leaves)
    own = {tensor.data_ptr() for tensor in leaves.values()}
    return sum(size for address, size in kept.items() if address not in own)
