"""Properties of the baseline predictors, for every model and posterior."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import acnml
from acnml import Bma, Classifier, Ensemble, Glm, Map, McDropout, Tempered
from acnml._util.batches import size, take
from acnml.predictors import LogitSampling
from cases import MLP, diagonal
from predicting import FINE, dropping, each_case, fingerprint, same


def baselines(model: nn.Module, build, classifier: Classifier | None = None) -> list:
    """All baselines whose result does not depend on the position in the batch."""
    classifier, posterior = classifier or Classifier(model), build(model)
    return [
        Ensemble((Map(classifier), Bma(classifier, posterior, samples=2))),
        Tempered(Bma(classifier, posterior, samples=2), 1.7),
        Glm(classifier, posterior),
        Glm(classifier, posterior, LogitSampling(samples=20, seed=3)),
    ]


def all_baselines(model: nn.Module, build) -> list:
    """All baselines, for a model of `dropping`."""
    return [McDropout(Classifier(model), samples=3), *baselines(model, build)]


@each_case
def test_rows_are_distributions(case, build):
    for predict in all_baselines(dropping(case, 0.5), build):
        log_probs = predict(case.x())
        assert log_probs.shape == (3, 3)
        assert not log_probs.requires_grad
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3).double(), **FINE)


@each_case
def test_the_users_model_is_untouched(case, build):
    model = dropping(case, 0.5).train()
    model.model.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = fingerprint(model)
    for predict in all_baselines(model, build):
        predict(case.x())
    assert same(before, fingerprint(model))


@each_case
def test_deterministic_and_without_global_random_state(case, build):
    state = torch.get_rng_state()
    first, again = ([p(case.x()) for p in all_baselines(dropping(case, 0.5), build)] for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@each_case
def test_a_batch_is_its_inputs_one_by_one(case, build):
    x = case.x(4)
    for predict in baselines(case.model(), build):
        one_by_one = torch.cat([predict(take(x, slice(i, i + 1))) for i in range(size(x))])
        torch.testing.assert_close(predict(x), one_by_one, rtol=1e-9, atol=1e-10)


def test_batches_larger_than_a_block():
    x = MLP.x(600)
    for predict in baselines(MLP.model(), diagonal):
        torch.testing.assert_close(predict(x)[300:303], predict(x[300:303]), rtol=1e-9, atol=1e-10)
    assert McDropout(Classifier(dropping(MLP, 0.5)), samples=2)(x).shape == (600, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_refuses_non_finite_logits(value):
    model = dropping(MLP, 0.5)
    build = diagonal(model, ["model.0.weight"])
    with torch.no_grad():
        model.model[2].bias[1] = value
    for predict in all_baselines(model, lambda _: build):
        with pytest.raises(ValueError, match="NaN or infinite for 3 of 3 inputs"):
            predict(MLP.x())


def test_dtype_follows_the_model():
    posterior = diagonal(dropping(MLP, 0.5))
    for dtype in (torch.float32, torch.bfloat16):
        for predict in all_baselines(dropping(MLP, 0.5).to(dtype), lambda _: posterior):
            log_probs = predict(MLP.x())  # float64 inputs and posterior
            assert log_probs.dtype == torch.float32
            assert (log_probs.exp().sum(-1) - 1).abs().max() < 1e-5


@each_case
def test_storage_round_trip(case, build, tmp_path):
    model, path = dropping(case, 0.5), tmp_path / "predictor.safetensors"
    for predict in all_baselines(model, build):
        acnml.save(predict, path)
        loaded = acnml.load(path, Classifier(model))
        assert type(loaded) is type(predict)
        assert torch.equal(loaded(case.x()), predict(case.x()))
