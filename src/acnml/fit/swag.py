"""SWAG: a Gaussian fitted to the weights along the path of SGD (Maddox et al. 2019)."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml._engine.trust import check
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml._util.messages import callers_level
from acnml._util.params import Params, add, scale, subtract, widened, zip_with
from acnml._util.structure import Layers, parameter_names, tracking_batch_norms, unwrapped
from acnml._util.torch_state import seeded
from acnml.classifier import Classifier, as_classifier
from acnml.fit.batches import cross_entropy, over_batches, require_loader
from acnml.posteriors import Diagonal, LowRank

MOMENTUM = 0.9

# A spread below this share of the weights is warned of. Trials with networks of handwritten digits:
# at 0.01, averaging over the posterior changes probabilities by about 0.001, at 0.03 by 0.01.
LEAST_SPREAD = 0.01

NO_EFFECT = (
    "the weights that SWAG has collected differ by only {percent:.2g} % of their size, so that the "
    "posterior will hardly change a prediction. Raise learning_rate={learning_rate:g} towards that "
    "of the training, or collect more epochs"
)
STALE = (
    "the stored statistics of batch norm do not fit the mean of the weights that SWAG has "
    "collected. Before you predict, recompute them: "
    "statistics = acnml.fit.batch_norm_statistics(classifier, loader, mean); "
    "classifier = classifier.at({**mean, **statistics})"
)

# Names and prefixes in a state dict.
RANK, UPDATES, ORDER = "rank", "updates", "order"
MEAN, SQUARES, DEVIATIONS = "mean/", "squares/", "deviations/"


@torch.inference_mode(False)
def fit_swag(
    model: nn.Module | Classifier,
    loader: Iterable[Any],
    *,
    epochs: int = 20,
    learning_rate: float = 0.01,
    rank: int = 20,
    seed: int = 0,
    layers: Layers = None,
    progress: bool | None = None,
) -> Swag:
    """Run SGD at a constant learning rate on a copy of the model and collect its weights.

    `fit_swag(...).low_rank()` is the SWAG posterior, and `fit_swag(...).diagonal()` is SWAG-D. To
    collect weights in a training loop of your own, use `Swag`.

    The posterior is as wide as the path of SGD. If a trained network hardly moves at this learning
    rate, the posterior has no effect, and a warning says so. The initial learning rate of the
    training is a good choice.

    If the model has batch norm, its stored statistics do not fit the mean of the weights. Recompute
    them before you predict:

        statistics = acnml.fit.batch_norm_statistics(classifier, loader, posterior.mean)
        classifier = classifier.at({**posterior.mean, **statistics})

    `Bma(classifier, posterior).refreshed(loader)` recomputes them for every sample as well.

    Args:
        model: the trained network, from which SGD starts.
        loader: the training data, with labels.
        epochs: number of passes over the data; the weights are collected after each.
        learning_rate: learning rate of SGD with momentum 0.9.
        rank: number of deviations to store.
        seed: random seed of dropout, and of the loader's order if the loader uses torch's global
            random state.
        layers: layers, parameters or their names to train and cover. The default is the whole
            model, including parameters that do not require gradients in the user's model.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> data = [(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(5)]
    >>> swag = acnml.fit_swag(torch.nn.Linear(4, 3), data, epochs=3, learning_rate=0.5)
    >>> swag.low_rank(), swag.diagonal()
    (LowRank(15 parameters: weight … bias), Diagonal(15 parameters: weight … bias))
    """
    classifier = as_classifier(model)
    require_loader(loader, "SWAG")
    if checks.require_integer(epochs, "epochs") < 2:
        raise ValueError(f"SWAG needs at least 2 epochs to estimate a variance, got {epochs}")
    module = classifier.copy_module()
    names = set(parameter_names(classifier.model, layers))
    trained = [p.requires_grad_(name in names) for name, p in module.named_parameters()]
    optimizer = torch.optim.SGD(
        [p for p in trained if p.requires_grad], lr=learning_rate, momentum=MOMENTUM
    )
    swag, stale = Swag(rank, names), _moved_batch_norms(module)

    def step(x: Inputs, labels: Tensor | None) -> None:
        if classifier.findings.is_due((), x):
            check(classifier, x)
        loss = cross_entropy(classifier.logits_of(module, x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with seeded(seed):
        for epoch in range(epochs):
            module.train()
            over_batches(classifier, loader, step, f"epoch {epoch + 1}/{epochs}", progress)
            swag.update(module)
    if (spread := swag.spread()) < LEAST_SPREAD:
        message = NO_EFFECT.format(percent=100 * spread, learning_rate=learning_rate)
        warnings.warn(message, stacklevel=callers_level())
    if stale:
        warnings.warn(STALE, stacklevel=callers_level())
    return swag


def _moved_batch_norms(module: nn.Module) -> set[str]:
    """Return a set to which runs of the module add batch-norm layers, by name.

    They are those whose inputs depend on a trained parameter: the only ones that require gradients.
    """
    moved: set[str] = set()
    for name, layer in tracking_batch_norms(module).items():

        def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            (x,) = args or kwargs.values()
            if x.requires_grad:
                moved.add(name)

        layer.register_forward_pre_hook(note, with_kwargs=True)
    return moved


@final
class Swag:
    """Collect the weights of a model in training; call `update(model)` in your training loop.

    It stores the running mean and variance of the weights, and their last `rank` deviations from
    the running mean. The mean is the solution of SWA (stochastic weight averaging). If the model
    has batch norm, recompute its statistics before you predict, see `fit_swag`.

    To resume training later, use `acnml.save(swag, path)` and `acnml.load(path)`, or include
    `swag.state_dict()` in your own checkpoint.

    Args:
        rank: number of deviations to store; the SWAG paper uses 20.
        layers: layers, parameters or their names to cover; by default the whole model.

    >>> swag, model = Swag(rank=2), nn.Linear(4, 3)
    >>> for _ in range(3):  # e.g. once per epoch
    ...     swag.update(model)
    >>> swag.low_rank()
    LowRank(15 parameters: weight … bias)
    >>> resumed = Swag.from_state_dict(swag.state_dict())
    >>> resumed.updates
    3
    """

    def __init__(self, rank: int = 20, layers: Layers = None) -> None:
        rank = checks.require_integer(rank, "rank")
        if rank < 2:
            raise ValueError(
                f"rank must be at least 2, got {rank}; for a diagonal covariance, use `diagonal()`"
            )
        self.rank, self.updates = rank, 0
        self.mean: Params = {}
        self._layers = layers  # used for the first update; later ones follow the mean
        self._squares: Params = {}  # Σ (θ - mean)², by Welford's algorithm for numerical stability
        self._deviations: deque[Params] = deque(maxlen=rank)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the model's current weights."""
        model = unwrapped(model)
        names = set(self.mean or parameter_names(model, self._layers))
        weights = widened({n: p.detach() for n, p in model.named_parameters() if n in names})
        if self.updates == 0:
            self.mean = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            self._squares = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        checks.require_fits(self.mean, weights)
        weights = {n: weights[n].to(mean.device) for n, mean in self.mean.items()}
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
        """Return SWAG: N(mean, ½ diag(variance) + ½ D Dᵀ / (r - 1)), with the r deviations D."""
        var, deviations = self._var(), list(self._deviations)
        share = 1 / math.sqrt(2 * (len(deviations) - 1))
        directions = {n: share * torch.stack([d[n] for d in deviations]) for n in self.mean}
        return LowRank(self.mean, scale(var, 0.5), directions)

    def spread(self) -> float:
        """Return √(Σ var / Σ mean²): the standard deviation as a share of the weights."""
        var = sum(float(tensor.double().sum()) for tensor in self._var().values())
        size = sum(float(tensor.double().square().sum()) for tensor in self.mean.values())
        return math.sqrt(var / size) if size else math.inf

    def state_dict(self) -> Params:
        """Return a copy of the running state as a flat dict of tensors.

        A `Swag` that continues from it is bitwise equal. safetensors sorts the names, but samples
        from the posterior depend on their order, so "order" has the original position of each.
        """
        deviations, names = list(self._deviations), list(self.mean)
        order = [names.index(name) for name in sorted(names)]
        return {
            RANK: torch.tensor(self.rank, device="cpu"),
            UPDATES: torch.tensor(self.updates, device="cpu"),
            ORDER: torch.tensor(order, dtype=torch.int64, device="cpu"),
            **{f"{MEAN}{name}": tensor.clone() for name, tensor in self.mean.items()},
            **{f"{SQUARES}{name}": tensor.clone() for name, tensor in self._squares.items()},
            **{f"{DEVIATIONS}{n}": torch.stack([d[n] for d in deviations]) for n in self.mean},
        }

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> Swag:
        """Construct a `Swag` from a state dict; it covers the same parameters, by name."""
        swag = Swag(int(state[RANK]))
        swag.load_state_dict(state)
        return swag

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` returned for a `Swag` of the same rank."""
        rank, updates = int(state[RANK]), int(state[UPDATES])
        if rank != self.rank:
            raise ValueError(
                f"the state is of Swag(rank={rank}), but this is Swag(rank={self.rank})"
            )
        mean = {n.removeprefix(MEAN): t for n, t in state.items() if n.startswith(MEAN)}
        names = [n for _, n in sorted(zip(state[ORDER].tolist(), sorted(mean), strict=True))]
        # Rows are cloned, because a view would keep the whole stack in memory.
        rows = range(min(updates, rank))
        deviations = [{n: state[DEVIATIONS + n][row].clone() for n in names} for row in rows]
        self._squares = {name: state[SQUARES + name].clone() for name in names}
        self.mean = {name: mean[name].clone() for name in names}
        self.updates, self._deviations = updates, deque(deviations, maxlen=rank)

    def _var(self) -> Params:
        if self.updates < 2:
            raise ValueError(
                f"SWAG needs at least 2 updates to estimate a variance, got {self.updates}"
            )
        return {n: (s / self.updates).clamp(min=0) for n, s in self._squares.items()}
