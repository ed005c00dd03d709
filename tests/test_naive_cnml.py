"""Naive CNML compared with a plain training loop, for every grouping of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from acnml import Classifier, last_linear
from acnml._util.batches import as_arguments, size, take
from acnml.fit import Refit
from acnml.predictors import NaiveCnml, NaiveCnmlMax
from cases import MODELS, normal
from refitting import Batches


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


@pytest.mark.parametrize(("rows", "blocks"), [(32, 1), (4, 2), (2, 3), (1, 6)])
def test_rows_that_train_together_learn_the_same(rows, blocks):
    """2 queries of 3 labels each, 2 epochs, and one pass to count the data."""
    case = MODELS[1]
    loader, queries = Batches(case.x(4), torch.arange(4) % 3, 4), case.x(2)
    refit = Refit(2, 0.3, rows=rows)
    actual = NaiveCnml(Classifier(case.model()), loader, refit).log_lik(queries)
    assert loader.passes == 1 + 2 * blocks
    expected = literal_rows(case.model(), loader, queries, refit)[..., -1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


class LooksAtNumbers(nn.Module):
    """Branches on a value, which `vmap` does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden.tanh() if hidden.abs().max().item() < 100 else hidden)


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


@pytest.mark.parametrize(("build", "blocks"), [(LooksAtNumbers, 6), (Recurrent, 6), (Tied, 1)])
def test_only_models_that_vmap_does_not_support_train_row_by_row(build, blocks):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double()
    loader, refit = Batches(normal(5, 4), torch.arange(5) % 3, 3, 2), Refit(2, 0.3)
    actual = NaiveCnml(Classifier(model), loader, refit).log_lik(normal(2, 4, seed=1))
    assert loader.passes == 1 + 2 * blocks
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
