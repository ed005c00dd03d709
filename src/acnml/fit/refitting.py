"""CNML by fine-tuning: train on the training set plus the query, once for every label.

CNML (conditional normalized maximum likelihood) predicts p(y|x) ∝ p_θ̂_y(y|x) for a query x. With n
training examples, θ̂_y are the weights that best fit these examples and the label y of the query:

    θ̂_y = argmin_θ F_y(θ),   F_y(θ) = (Σ_i -log p_θ(y_i|x_i) - log p_θ(y|x)) / n + w/2 ‖θ‖².

A few epochs of SGD, starting at the model's weights, approximate θ̂_y. Without weight decay w this
is CNML, and with it CNMAP (Zhou & Levine 2021, section 2). ACNML is a fast approximation of both.

A row is one label of one query. Every row has its own weights, but all rows use the same batches,
so many rows can be trained together. Layers before the first trained layer run only once per batch
for all of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional

from acnml._engine.trust import check
from acnml._util import batches, checks
from acnml._util.batches import NO_LABELS, Inputs, in_chunks
from acnml._util.memory import budget, require_memory
from acnml._util.messages import track
from acnml._util.params import Params, map_tensors, zip_with
from acnml._util.structure import Layers, parameter_names
from acnml._util.torch_state import seeded
from acnml.classifier import Classifier
from acnml.fit.batches import batch_sizes, over_batches, require_classes, require_loader

# Memory of a row. Weight-sized tensors: the weights, the velocity, the gradients of the data loss
# and of the query loss, and their sum. Activation-sized tensors: those saved by autograd, their
# gradients, and temporary results.
COPIES_OF_WEIGHTS = 5
COPIES_OF_ACTIVATIONS = 3

# A function of a row's (θ, query, label) that returns tensors.
RowFunction: TypeAlias = Callable[[Params, Inputs, Tensor], Any]


@final
@dataclass(frozen=True)
class Refit:
    """Settings of the fine-tuning: SGD with momentum at a constant learning rate.

    The network runs in eval mode, as in ACNML: dropout is off and batch norm uses its stored
    statistics.

    Args:
        epochs: number of passes over the training data.
        learning_rate: learning rate for the mean loss over the data.
        momentum: momentum of SGD.
        weight_decay: w. The loss contains w/2 ‖θ‖², as in `torch.optim.SGD`. With n examples this
            corresponds to the prior N(0, 1/(n w) I) of CNMAP. Use the value from the model's
            training.
        seed: random seed of the loader's order, if the loader uses torch's global random state. All
            rows then use the same batches.
        memory: maximum memory in bytes for rows that are trained together; by default a fraction of
            the free memory. Use 1 to train rows one by one, without `torch.func.vmap`.

    >>> import acnml
    >>> acnml.fit.Refit(epochs=1, learning_rate=0.1).momentum  # see `NaiveCnml`
    0.9
    """

    epochs: int = 5
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0
    memory: int | None = None

    def __post_init__(self) -> None:
        checks.settle_integers(self, epochs=1, seed=None)
        checks.require_positive(self.learning_rate, "learning_rate")
        require_memory(self.memory)


class Refitted(NamedTuple):
    """log p_θ(y|x) for every label y, where θ was fine-tuned on this label."""

    last: Tensor  # (..., K) at the end of training
    best: Tensor  # (..., K) the maximum over the steps of the last epoch


@torch.inference_mode(False)
def refit_each(
    classifier: Classifier,
    loader: Iterable[Any],
    x: Inputs,
    refit: Refit,
    layers: Layers = None,
    progress: bool | None = None,
) -> Iterator[Refitted]:
    """Yield the fine-tuned log-likelihoods (K,) of each input in turn.

    Inputs are processed in chunks that fit into memory. A chunk is trained when its first result is
    requested. Up to rounding, the result of an input does not depend on the other inputs.

    Args:
        classifier: the trained model, e.g. `classifier.at(posterior.mean)`.
        loader: the training data, with labels. One extra pass counts the examples.
        x: the queries, without labels.
        refit: the settings of the fine-tuning.
        layers: layers, parameters or their names to train; by default the whole model.
        progress: whether to show progress bars; by default only in a terminal.
    """
    require_loader(loader, "fine-tuning")
    queries = classifier.prepare(x)
    if classifier.findings.is_due((), queries):
        check(classifier, queries)
    with torch.no_grad():
        log_probs = torch.cat([*in_chunks(queries, classifier.log_probs)])
    remedy = "check the model and these inputs"
    checks.require_finite(log_probs, "the model's log-probabilities are", remedy)
    names = parameter_names(classifier.model, layers)
    with seeded(refit.seed):
        training = _Training(classifier, loader, names, refit, batch_sizes(loader), progress)
    labels = torch.arange(log_probs.shape[1], device=log_probs.device)
    rows = training.rows_at_once(batches.take(queries, slice(0, 1)), labels)
    blocks = list(batches.chunks(queries, max(1, rows // len(labels))))
    each = (training.run(block, labels, rows) for block in track(blocks, "queries", progress))
    return (Refitted(*one) for block in each for one in zip(*block, strict=True))


@final
@dataclass(frozen=True)
class _Training:
    """The model, the training data and the settings of the fine-tuning."""

    classifier: Classifier
    loader: Iterable[Any]
    names: list[str]
    refit: Refit
    batch_sizes: list[int]
    progress: bool | None

    @torch.inference_mode(False)
    def rows_at_once(self, one: Inputs, labels: Tensor) -> int:
        """Return how many rows fit into memory, or 1 if `vmap` does not support the model."""
        start = self.classifier.copy_parameters(self.names)
        if not self.classifier.gradient(one, start):
            raise ValueError(
                f"the model's logits use none of the parameters {self.names}; "
                "name layers that the forward pass uses"
            )
        weights = sum(tensor.nbytes for tensor in start.values())
        activations = max(self.batch_sizes) * _activation_bytes(self.classifier, start, one)
        row = COPIES_OF_WEIGHTS * weights + COPIES_OF_ACTIVATIONS * activations
        rows = budget(labels.device, self.refit.memory) // row
        return rows if rows > 1 and self._can_vectorise(one, labels[:2]) else 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self, queries: Inputs, labels: Tensor, rows: int) -> Refitted:
        """Train all labels of the queries, at most `rows` rows together; return (Q, K) tensors."""
        parts = [self._train(self._rows(queries, some, rows > 1)) for some in labels.split(rows)]
        return Refitted(*(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)))

    def _rows(self, queries: Inputs, labels: Tensor, together: bool) -> _Rows:
        lead = (batches.size(queries), len(labels))
        start = self.classifier.copy_parameters(self.names)
        theta = {name: t.expand(*lead, *t.shape).clone() for name, t in start.items()}
        return _Rows(theta, zip_with(torch.zeros_like, theta), queries, labels, together)

    def _train(self, rows: _Rows) -> Refitted:
        """Train (Q, L) rows and return their log-likelihoods."""
        before_steps: list[Tensor] = []  # (Q, L) of the current epoch

        def step(x: Inputs, y: Tensor | None) -> None:
            gradient, (loss, log_lik) = rows.evaluate(self._gradient(x, y))
            if not torch.isfinite(loss).all():
                remedy = "lower the learning rate, or check the model on this batch"
                raise ValueError(f"the loss is NaN or infinite: {remedy}")
            before_steps.append(log_lik)
            rows.descend(gradient, self.refit)

        with seeded(self.refit.seed):
            for epoch in range(self.refit.epochs):
                before_steps.clear()
                description = f"epoch {epoch + 1}/{self.refit.epochs}"
                over_batches(self.classifier, self.loader, step, description, self.progress)
        last = rows.evaluate(self._log_lik)
        checks.require_finite(last, "log-likelihoods are", "lower the learning rate")
        return Refitted(last, torch.stack([*before_steps[1:], last]).amax(0))

    def _gradient(self, x: Inputs, y: Tensor | None) -> RowFunction:
        """Return a function that gives (gradient, (loss, log p_θ(label|query))) on this batch.

        The average of the losses over an epoch is F_y without the weight decay. This holds also if
        batches differ in size.
        """
        if y is None:
            raise ValueError(NO_LABELS)
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
        """Return whether `vmap` works for this model, by a trial with the query as the data."""
        rows = self._rows(one, labels, together=True)
        try:
            rows.evaluate(self._gradient(one, labels[:1]))
            rows.evaluate(self._log_lik)  # some models run different code without gradients
        except (RuntimeError, ValueError):
            return False
        return True


class _Rows(NamedTuple):
    """Rows in training: labels (L,) of queries (Q, ...), each pair with its own weights."""

    theta: Params  # (Q, L, *shape)
    velocity: Params
    queries: Inputs
    labels: Tensor
    together: bool  # whether rows are evaluated by `vmap`; otherwise there is a single one

    def evaluate(self, function: RowFunction) -> Any:
        """Evaluate the function for all rows; each result tensor gets the leading shape (Q, L)."""
        if self.together:
            over_labels = vmap(function, in_dims=(0, None, 0))
            over_queries = vmap(over_labels, in_dims=(0, 0, None))
            return over_queries(self.theta, self.queries, self.labels)
        theta = {name: tensor[0, 0] for name, tensor in self.theta.items()}
        result = function(theta, batches.take(self.queries, 0), self.labels[0])
        return map_tensors(result, lambda tensor: tensor[None, None])

    def descend(self, gradient: Params, refit: Refit) -> None:
        """Take a step of SGD in place, with the update rule of `torch.optim.SGD`."""
        for name, point in self.theta.items():
            velocity = self.velocity[name].mul_(refit.momentum).add_(gradient[name])
            velocity.add_(point, alpha=refit.weight_decay)
            point.sub_(velocity, alpha=refit.learning_rate)


def _activation_bytes(classifier: Classifier, params: Params, one: Inputs) -> int:
    """Return the number of bytes that autograd saves for one input.

    Only tensors that depend on the parameters count, because rows share the others.
    """
    kept: dict[int, int] = {}  # by address, because several operations may save the same tensor

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
