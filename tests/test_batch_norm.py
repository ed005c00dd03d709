"""Recomputing batch-norm statistics for new weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import acnml
from acnml import Bma, Classifier
from acnml.fit import batch_norm_statistics
from cases import MODELS, POSTERIORS, normal


def test_batch_norm_refresh_equals_torchs():
    case = MODELS[2]
    model = case.model()
    posterior = POSTERIORS["diagonal"](model)
    data = [(normal(8, 2, 5, 5, seed=i), torch.zeros(8)) for i in range(3)]
    refreshed = Bma(Classifier(model), posterior, samples=2, seed=1).refreshed(data)
    generator = torch.Generator().manual_seed(1)
    probs = []
    for _ in range(2):
        point, other = posterior.sample(1, generator), copy.deepcopy(model)
        other.load_state_dict({n: t[0] for n, t in point.items()}, strict=False)
        torch.optim.swa_utils.update_bn(data, other)
        probs.append(other.eval()(case.x()).softmax(-1))
    torch.testing.assert_close(
        refreshed(case.x()).exp(), torch.stack(probs).mean(0), rtol=1e-10, atol=1e-10
    )


def test_batch_norm_refresh_is_stored(tmp_path):
    case = MODELS[2]
    model = case.model()
    bma = Bma(Classifier(model), POSTERIORS["diagonal"](model), samples=2)
    refreshed = bma.refreshed([normal(8, 2, 5, 5)])
    acnml.save(refreshed, tmp_path / "bma.safetensors")
    loaded = acnml.load(tmp_path / "bma.safetensors", Classifier(model))
    assert torch.equal(loaded(case.x()), refreshed(case.x()))
    assert not torch.equal(bma(case.x()), refreshed(case.x()))


class Twice(nn.Module):
    """A network that uses one batch-norm layer twice, once with more values per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x.mT).mean(-1) + self.norm(input=x[:, 0]))


def weighted(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and variances of rows (n, channels), averaged with the weights n."""
    total = sum(len(part) for part in parts)
    return (
        sum(len(part) * part.mean(0) for part in parts) / total,
        sum(len(part) * part.var(0) for part in parts) / total,
    )


def first_layer(data, rows: int = 4) -> list[torch.Tensor]:
    """The statistics of batch norm at the inputs themselves: dropout is off."""
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(rows), nn.Linear(rows, 3)).double()
    found = batch_norm_statistics(Classifier(model.train()), data)
    assert list(found) == ["1.running_mean", "1.running_var"]
    assert not model[1].running_mean.any()
    return list(found.values())


@pytest.mark.parametrize("count", [2, 255, 256, 257, 258, 513, 600])
def test_rows_in_memory_have_equal_weights(count):
    x = normal(count, 4)
    x[-2:] += 100
    mean, var = first_layer(x)
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-12, atol=1e-12)
    batches = -(-count // 256)
    expected = weighted([x[i::batches] for i in range(batches)])[1]
    torch.testing.assert_close(var, expected, rtol=1e-12, atol=1e-12)
    if batches == 1:
        torch.testing.assert_close(var, x.var(0), rtol=1e-12, atol=1e-12)


def test_batches_are_weighted_by_their_size():
    data = [normal(n, 4, seed=n) + n for n in (8, 3, 5)]
    for found, expected in zip(first_layer(data), weighted(data), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_layer_that_is_used_twice_averages_over_all_its_values():
    model, data = Twice().double(), [normal(n, 6, 4, seed=n) + n for n in (8, 3)]
    found = batch_norm_statistics(Classifier(model), data)
    parts = [rows for x in data for rows in (x.flatten(0, 1), x[:, 0])]
    for name, expected in zip(("running_mean", "running_var"), weighted(parts), strict=True):
        torch.testing.assert_close(found[f"norm.{name}"], expected, rtol=1e-12, atol=1e-12)


def test_without_batch_norm_or_data():
    assert batch_norm_statistics(Classifier(nn.Linear(4, 3)), [torch.ones(2, 4)]) == {}
    with pytest.raises(ValueError, match="the loader gave no batch"):
        batch_norm_statistics(Classifier(MODELS[2].model()), [])
