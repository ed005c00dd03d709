"""Recomputing batch-norm statistics for new weights."""

from __future__ import annotations

import copy

import torch

import acnml
from acnml import Bma, Classifier
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
