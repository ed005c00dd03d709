"""Naive CNML against a training loop and exact refits by scipy; seeds, side effects, errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from acnml import Classifier, last_linear
from acnml._util.batches import as_arguments, map_inputs, size, take
from acnml.fit import Refit
from acnml.predictors import NaiveCnml, NaiveCnmlMax
from cases import MODELS, TwoLayers, normal, seeded

# Labels that no line separates, so that the likelihood has a maximum.
X, Y = normal(12, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 1, 0])
QUERIES = normal(2, 2, seed=5)


def regression() -> nn.Linear:
    model = nn.Linear(2, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class Batches:
    """A loader that counts the passes over it."""

    def __init__(self, x: Any, y: Tensor, *sizes: int) -> None:
        ends = np.cumsum(sizes)
        slices = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
        self.batches = [(take(x, part), y[part]) for part in slices]
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        self.passes += 1
        yield from self.batches


# A plain training loop ----------------------------------------------------------------------------


def joined(x: Any, query: Any) -> Any:
    if isinstance(x, dict):
        return {name: torch.cat([x[name], query[name]]) for name in x}
    if isinstance(x, tuple):
        return tuple(torch.cat(pair) for pair in zip(x, query, strict=True))
    return torch.cat([x, query])


def literal(model: nn.Module, loader: Batches, query: Any, label: int, refit: Refit) -> list[float]:
    """log p_θ(label|query) after every step of the last epoch, of the parameters with gradients.

    The paper's words: the query is appended to every minibatch, its loss down-weighted.
    """
    model, steps = copy.deepcopy(model).eval(), len(loader.batches)
    data = sum(len(y) for _, y in loader.batches)
    learning = [p for p in model.parameters() if p.requires_grad]
    settings = {"momentum": refit.momentum, "weight_decay": refit.weight_decay}
    optimizer = torch.optim.SGD(learning, lr=refit.learning_rate, **settings)

    def logits(x: Any) -> Tensor:
        args, kwargs = as_arguments(x)
        return model(*args, **kwargs)

    for _ in range(refit.epochs):
        seen = []
        for x, y in loader.batches:
            weights = torch.tensor([steps / data] * len(y) + [1 / data], dtype=torch.float64)
            targets = torch.cat([y, torch.tensor([label])])
            losses = nn.functional.cross_entropy(
                logits(joined(x, query)), targets, reduction="none"
            )
            optimizer.zero_grad()
            (weights @ losses).backward()
            optimizer.step()
            seen.append(logits(query).log_softmax(-1)[0, label].item())
    return seen


def literal_rows(model: nn.Module, loader: Batches, x: Any, refit: Refit) -> Tensor:
    """(B, K, steps): `literal` for every label of every input."""
    queries = [take(x, slice(i, i + 1)) for i in range(size(x))]
    rows = [[literal(model, loader, q, y, refit) for y in range(3)] for q in queries]
    return torch.tensor(rows, dtype=torch.float64)


def learning_only(model: nn.Module, names: list[str]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("rows", [1, 32], ids=["one by one", "together"])
def test_is_the_literal_training_loop(case, layers, rows):
    model, refit = case.model(), Refit(2, 0.3, momentum=0.8, weight_decay=0.05, rows=rows)
    head = last_linear(model)
    names = [n for n, p in model.named_parameters() if layers == "all" or p in {*head.parameters()}]
    loader, x = Batches(case.x(7), torch.arange(7) % 3, 3, 3, 1), case.x(9)
    queries = take(x, slice(7, 9))
    expected = literal_rows(learning_only(model, names), loader, queries, refit)
    classifier = Classifier(model)
    last = NaiveCnml(classifier, loader, refit, names).log_lik(queries)
    best = NaiveCnmlMax(classifier, loader, refit, names).log_lik(queries)
    torch.testing.assert_close(last, expected[..., -1], rtol=0, atol=1e-10)
    torch.testing.assert_close(best, expected.amax(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("rows", "blocks"), [(4, 2), (1, 6)])
def test_rows_that_train_together_learn_the_same(rows, blocks):
    """2 queries of 3 labels each, 2 epochs, and one pass to count the data."""
    case = MODELS[1]
    loader, queries = Batches(case.x(4), torch.arange(4) % 3, 4), case.x(2)
    refit = Refit(2, 0.3, rows=rows)
    actual = NaiveCnml(Classifier(case.model()), loader, refit).log_lik(queries)
    assert loader.passes == 1 + 2 * blocks
    expected = literal_rows(case.model(), loader, queries, refit)[..., -1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


class LooksAtNumbers(TwoLayers):
    """Branches on a value, which `vmap` does not support."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().max().item() < 100 else self.head(self.body(x))


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.again, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.body(x).tanh()).tanh())


class Recurrent(nn.Module):
    """An LSTM over the entries of an input, which `vmap` supports only with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unsqueeze(-1))[0][:, -1])


@pytest.mark.parametrize(("build", "rows"), [(LooksAtNumbers, 1), (Recurrent, 32), (Tied, 32)])
def test_models_that_vmap_does_not_support_train_row_by_row(build, rows):
    model = seeded(build)
    loader, refit = Batches(normal(5, 4), torch.arange(5) % 3, 3, 2), Refit(2, 0.3, rows=rows)
    actual = NaiveCnml(Classifier(model), loader, refit).log_lik(normal(2, 4, seed=1))
    if rows == 1:
        with pytest.raises(ValueError, match=r"vmap.* train row by row, with Refit\(rows=1\)"):
            NaiveCnml(Classifier(model), loader, Refit(2, 0.3))(normal(2, 4, seed=1))
    expected = literal_rows(model, loader, normal(2, 4, seed=1), refit)[..., -1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_layers_before_the_trained_ones_run_once_for_all_rows():
    """In an epoch, the frozen layer processes the data once, and not once per row."""
    ins, hidden, classes, data, queries = 7, 16, 3, 5, 2
    model = nn.Sequential(nn.Linear(ins, hidden), nn.Tanh(), nn.Linear(hidden, classes)).double()
    loader = [(normal(data, ins), torch.arange(data) % classes)]

    def flops(epochs: int) -> int:
        predict = NaiveCnml(Classifier(model), loader, Refit(epochs), [model[2]])
        with FlopCounterMode(display=False) as counter:
            predict.log_lik(normal(queries, ins))
        return counter.get_total_flops()

    frozen = 2 * ins * hidden * (data + queries * classes)
    trained = 4 * hidden * classes * (data + 1) * queries * classes  # forward, and by the weights
    assert flops(epochs=2) - flops(epochs=1) == frozen + trained


# Exact refits ------------------------------------------------------------------------------------


def exact_log_lik(query: Tensor, label: int, weight_decay: float) -> float:
    """log p_θ̂(y|x) of the θ̂ that is fitted to the data and the query, found by scipy."""
    inputs = torch.cat([X, query[None]]).numpy()
    labels = np.append(Y.numpy(), label)

    def log_lik(flat: np.ndarray) -> np.ndarray:
        weight, bias = flat[:6].reshape(3, 2), flat[6:]
        return log_softmax(inputs @ weight.T + bias, axis=1)[np.arange(13), labels]

    def objective(flat: np.ndarray) -> float:
        return -log_lik(flat).sum() / len(X) + weight_decay / 2 * (flat @ flat)

    fit = optimize.minimize(objective, np.zeros(9), tol=1e-10)
    return float(log_lik(fit.x)[-1])


@pytest.mark.parametrize("weight_decay", [0.0, 0.2], ids=["CNML", "CNMAP"])
def test_many_epochs_of_full_batches_are_the_exact_refit(weight_decay):
    refit = Refit(epochs=400, learning_rate=2.0, weight_decay=weight_decay)
    actual = NaiveCnml(Classifier(regression()), [(X, Y)], refit).log_lik(QUERIES)
    rows = [[exact_log_lik(query, y, weight_decay) for y in range(3)] for query in QUERIES]
    torch.testing.assert_close(actual, torch.tensor(rows).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (7, 1, 4), (11, 1)])
def test_the_steps_of_a_pass_average_to_a_step_down_the_whole_objective(sizes):
    """To first order in the learning rate ε, a pass moves the weights by -ε · steps · ∇F."""
    model, epsilon, weight_decay, label = MODELS[1].model(), 1e-7, 0.5, 1
    x, y, query = normal(12, 4), torch.arange(12) % 3, normal(1, 4, seed=3)
    refit = Refit(1, epsilon, momentum=0, weight_decay=weight_decay)
    after = NaiveCnml(Classifier(model), Batches(x, y, *sizes), refit).log_lik(query)[0, label]

    weights = list(model.parameters())
    log_lik = model(query).log_softmax(-1)[0, label]
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    penalty = sum(w.square().sum() for w in weights)
    objective = (loss - log_lik) / 12 + weight_decay / 2 * penalty
    gradients = (torch.autograd.grad(f, weights, retain_graph=True) for f in (log_lik, objective))
    slope = -sum((a * b).sum() for a, b in zip(*gradients, strict=True))
    moved = (after - log_lik.detach()) / (epsilon * len(sizes))
    torch.testing.assert_close(moved, slope, rtol=1e-5, atol=0)


# Seeds, independence of inputs, no side effects, errors ------------------------------------------


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_touches_neither_the_model_nor_the_random_state(case, mode):
    model, y = case.model().train(), torch.arange(3)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with mode():
        x = map_inputs(case.x(2), torch.clone)
        actual = NaiveCnml(Classifier(model), [(case.x(), y)], Refit(1))(x)
    torch.testing.assert_close(actual.exp().sum(1), torch.ones(2).double())
    assert not actual.requires_grad
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_result_does_not_depend_on_the_other_inputs():
    """An interrupted run can therefore continue with the remaining inputs."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    predict = NaiveCnmlMax(Classifier(regression()), loader, Refit(2, 0.5))
    x = normal(5, 2, seed=7)
    together = predict.log_lik(x)
    begun = predict.log_lik_each(x)
    first = [next(begun), next(begun)]
    torch.rand(3)  # what happens to the global random state meanwhile does not matter
    resumed = torch.stack([*first, *predict.log_lik_each(x[2:])])
    torch.testing.assert_close(resumed, together, rtol=0, atol=1e-10)
    alone = torch.cat([predict.log_lik(one[None]) for one in x])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-10)


def test_the_seed_decides_the_order_of_the_data():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True)
    first, again, other = (
        NaiveCnml(Classifier(regression()), loader, Refit(1, 0.5, seed=seed)).log_lik(QUERIES)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("loader", "x", "message"),
    [
        (lambda: [], QUERIES, "the loader gave no batch"),
        (lambda: iter([(X, Y)]), QUERIES, "an iterator that was used before"),
        (lambda: [X], QUERIES, "batch 0: there are no labels"),
        (lambda: [(X, Y), (X, Y + 1)], QUERIES, "batch 1: label 3 is outside .* first at index 2"),
        (lambda: [(X, Y)], QUERIES * math.nan, "input x is NaN"),
        (lambda: [(1e6 * X, Y)], QUERIES, r"batch 0: .*lower the learning rate"),
    ],
)
def test_refuses_bad_data(loader, x, message):
    with pytest.raises(ValueError, match=message):
        NaiveCnml(Classifier(regression()), loader(), Refit(9, 1e300))(x)


def test_names_the_query_for_which_the_model_is_not_finite():
    model = regression()
    nn.init.constant_(model.weight, 1e200)
    x = QUERIES * torch.tensor([[1.0], [1e200]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"log-probabilities are NaN .* first at index 1; check"):
        NaiveCnml(Classifier(model), [(X, Y)])(x)
