"""CNML by fine-tuning: train on the training set plus the query, once for every label.

CNML (conditional normalized maximum likelihood) predicts p(y|x) ∝ p_θ̂_y(y|x) for a query x. With n
training examples, θ̂_y are the weights that best fit these examples and the label y of the query:

    θ̂_y = argmin_θ F_y(θ),   F_y(θ) = (Σ_i -log p_θ(y_i|x_i) - log p_θ(y|x)) / n + w/2 ‖θ‖².

A few epochs of SGD, starting at the model's weights, approximate θ̂_y. Without weight decay w this
is CNML, and with it CNMAP (Zhou & Levine 2021, section 2). ACNML is a fast approximation of both.

A row is one label of one query. Every row has its own weights, but all rows use the same batches,
so many rows can be trained together, by `torch.func.vmap`. Layers before the first trained layer
run only once per batch for all of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional

from acnml._engine.trust import check
from acnml._util import batches, checks
from acnml._util.batches import NO_LABELS, Inputs, in_chunks
from acnml._util.messages import track
from acnml._util.params import Params, map_tensors, zip_with
from acnml._util.structure import Layers, parameter_names
from acnml._util.torch_state import seeded
from acnml.classifier import Classifier
from acnml.fit.batches import batch_sizes, over_batches, require_classes, require_loader


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
        rows: number of pairs of query and label that are trained together, by `torch.func.vmap`.
            More are faster and take more memory: about five times the trained weights each, and the
            activations of a batch. Use 1 for models that `vmap` does not support.

    >>> acnml.fit.Refit(epochs=1, learning_rate=0.1).momentum  # see `NaiveCnml`
    0.9
    """

    epochs: int = 5
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0
    rows: int = 32

    def __post_init__(self) -> None:
        checks.settle_integers(self, epochs=1, seed=None, rows=1)
        checks.require_positive(self.learning_rate, "learning_rate")


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
    """Yield the fine-tuned log-likelihoods (K,) of each input in turn; see `NaiveCnml`.

    Rows are trained when the first result that needs them is requested. Up to rounding, the result
    of an input does not depend on the other inputs.
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
    if not classifier.gradient(queries, classifier.copy_parameters(names)):
        raise ValueError(
            f"the model's logits use none of the parameters {names}; "
            "name layers that the forward pass uses"
        )
    with seeded(refit.seed):
        training = _Training(classifier, loader, names, refit, batch_sizes(loader), progress)
    n, classes = log_probs.shape
    return training.each(queries, n, classes)


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

    def each(self, queries: Inputs, n: int, classes: int) -> Iterator[Refitted]:
        """Yield the result of each of n queries, once all its rows are trained."""
        query, label = torch.cartesian_prod(torch.arange(n), torch.arange(classes)).T
        rows = self.refit.rows
        parts = list(zip(query.split(rows), label.split(rows), strict=True))
        done: list[tuple[Tensor, Tensor]] = []  # of rows whose query is not yet complete
        for some, labels in track(parts, "rows", self.progress):
            done += zip(*self._trained(batches.take(queries, some), labels), strict=True)
            while len(done) >= classes:
                yield Refitted(*map(torch.stack, zip(*done[:classes], strict=True)))
                del done[:classes]

    def _rows(self, queries: Inputs, labels: Tensor) -> _Rows:
        start = self.classifier.copy_parameters(self.names)
        theta = {name: t.expand(len(labels), *t.shape).clone() for name, t in start.items()}
        device = next(iter(start.values())).device
        return _Rows(theta, zip_with(torch.zeros_like, theta), queries, labels.to(device))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _trained(self, queries: Inputs, labels: Tensor) -> Refitted:
        """Train R rows and return their log-likelihoods."""
        rows = self._rows(queries, labels)
        before_steps: list[Tensor] = []  # (R,) of the current epoch

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
        # With gradients, because some models run other code without them, which vmap cannot.
        _, last = rows.evaluate(grad_and_value(self._log_lik))
        checks.require_finite(last, "log-likelihoods are", "lower the learning rate")
        return Refitted(last, torch.stack([*before_steps[1:], last]).amax(0))

    def _gradient(self, x: Inputs, y: Tensor | None) -> Callable[..., Any]:
        """Return a function of a row's (θ, query, label) that gives (∇loss, (loss, log_lik)).

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


class _Rows(NamedTuple):
    """Rows in training, each with weights of its own."""

    theta: Params  # (R, *shape)
    velocity: Params
    queries: Inputs  # (R, ...)
    labels: Tensor  # (R,)

    def evaluate(self, function: Callable[..., Any]) -> Any:
        """Evaluate a function of (θ, query, label) for all rows, by `vmap` unless there is one."""
        if len(self.labels) > 1:
            try:
                return vmap(function)(self.theta, self.queries, self.labels)
            except (RuntimeError, ValueError) as error:
                if "vmap" not in str(error):
                    raise
                raise ValueError(f"{error}; train row by row, with Refit(rows=1)") from error
        theta = {name: tensor[0] for name, tensor in self.theta.items()}
        result = function(theta, batches.take(self.queries, 0), self.labels[0])
        return map_tensors(result, lambda tensor: tensor[None])

    def descend(self, gradient: Params, refit: Refit) -> None:
        """Take a step of SGD in place, with the update rule of `torch.optim.SGD`."""
        for name, point in self.theta.items():
            velocity = self.velocity[name].mul_(refit.momentum).add_(gradient[name])
            velocity.add_(point, alpha=refit.weight_decay)
            point.sub_(velocity, alpha=refit.learning_rate)
