"""Properties of predictors, over every model and posterior."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import acnml
from acnml import Acnml, Bma, Classifier, Ensemble, Glm, Map, McDropout, Tempered
from acnml._util.batches import size, take
from acnml.predictors import LogitSampling
from acnml.solve import Reference
from cases import MODELS, POSTERIORS, Case, diagonal, normal
from predicting import Idle, bad_inputs, dropping, each_case, fingerprint, posterior_over, same


def predictors(model: nn.Module, build) -> list:
    """All whose result for an input does not depend on its position in the batch."""
    classifier, posterior = Classifier(model), build(model)
    bma = Bma(classifier, posterior, samples=3)
    return [
        *(Map(classifier), bma, Acnml(classifier, posterior), Tempered(bma, 1.7)),
        *(Ensemble((Map(classifier), bma)), Glm(classifier, posterior)),
        Glm(classifier, posterior, LogitSampling(samples=20, seed=3)),
    ]


def all_predictors(model: nn.Module, build) -> list:
    """For a model of `dropping`."""
    return [*predictors(model, build), McDropout(Classifier(model), samples=3)]


@each_case
def test_rows_are_distributions(case, build):
    for predict in all_predictors(dropping(case, 0.5), build):
        log_probs = predict(case.x())
        assert log_probs.shape == (3, 3)
        assert not log_probs.requires_grad
        torch.testing.assert_close(
            log_probs.exp().sum(-1), torch.ones(3).double(), rtol=1e-12, atol=1e-12
        )


@each_case
def test_a_batch_is_its_inputs_one_by_one(case, build):
    x = case.x(4)
    for predict in predictors(case.model(), build):
        one_by_one = torch.cat([predict(take(x, slice(i, i + 1))) for i in range(size(x))])
        torch.testing.assert_close(predict(x), one_by_one, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_probabilities_and_classes_are_those_of_the_log_probabilities(case):
    for predict in predictors(case.model(), POSTERIORS["diagonal"]):
        log_probs = predict(case.x())
        assert torch.equal(predict.probs(case.x()), log_probs.exp())
        assert torch.equal(predict.predict(case.x()), log_probs.argmax(-1))


def test_an_input_without_an_answer_has_no_class():
    case = MODELS[1]
    x, model = case.x(), case.model()
    x[1, 2] = math.nan
    flagging = Acnml(Classifier(model), diagonal(model), alpha=0.1, on_error="flag")
    for predict in (flagging, acnml.Ensemble((flagging,))):
        first, _, last = predict(x).argmax(-1).tolist()
        assert predict.predict(x).tolist() == [first, -1, last]
        assert predict.predict(x.numpy()).tolist() == [first, -1, last]
        assert predict.probs(x).isnan().any(-1).tolist() == [False, True, False]


def runs_of(predict, x, monkeypatch) -> int:
    """Return the number of forward passes of a call, after checks that are done only once."""
    run, count = Classifier.logits, []

    def counted(self, *args, **kwargs):
        count.append(1)
        return run(self, *args, **kwargs)

    predict(x)
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "logits", counted)
        predict(x)
    return len(count)


def test_calls_run_the_network_no_more_often_than_needed(monkeypatch):
    case = MODELS[1]
    classifier, posterior = Classifier(case.model()), POSTERIORS["last_layer"](case.model())
    assert runs_of(Bma(classifier, posterior, samples=3), case.x(), monkeypatch) == 3
    assert runs_of(acnml.Glm(classifier, posterior), case.x(), monkeypatch) == 1
    assert runs_of(Acnml(classifier, posterior, alpha=0.1), case.x(), monkeypatch) == 1
    # Over all layers: one input, or a batch, at the mean; all rows at the solution.
    solver = acnml.Linearised("network")
    literal = Acnml(classifier, diagonal(case.model()), solver, 0.1, on_unsolved="ignore")
    assert runs_of(literal, case.x(1), monkeypatch) == 2
    assert runs_of(literal, case.x(3), monkeypatch) == 3


def test_batches_larger_than_a_block(monkeypatch):
    case = MODELS[1]
    for predict in predictors(case.model(), POSTERIORS["diagonal"]):
        x = case.x(600)
        torch.testing.assert_close(predict(x)[300:303], predict(x[300:303]), rtol=1e-11, atol=1e-12)


@each_case
def test_small_alpha_is_map(case, build):
    model = case.model()
    expected = Map(Classifier(model))(case.x())
    errors = [
        (Acnml(Classifier(model), build(model), alpha=alpha)(case.x()) - expected).abs().max()
        for alpha in (1e-3, 1e-6)
    ]
    assert errors[1] < 1e-4
    assert 500 < errors[0] / errors[1] < 2000  # to first order proportional to alpha


@each_case
def test_small_covariance_makes_averages_map(case, build):
    classifier, narrow = Classifier(case.model()), build(case.model()).scaled(1e-20)
    expected = Map(classifier)(case.x())
    for rule in (partial(Bma, samples=3), Glm, partial(Glm, link=LogitSampling(samples=5))):
        found = rule(classifier, narrow)(case.x())
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_bma_is_the_average_over_its_samples():
    case = MODELS[1]
    model, x = case.model(), case.x()
    posterior = POSTERIORS["low_rank"](model)
    generator = torch.Generator().manual_seed(5)
    draws = [posterior.sample(1, generator) for _ in range(4)]
    probs = [
        torch.func.functional_call(model, {n: t[0] for n, t in draw.items()}, x).softmax(-1)
        for draw in draws
    ]
    actual = Bma(Classifier(model), posterior, samples=4, seed=5)(x)
    torch.testing.assert_close(actual.exp(), torch.stack(probs).mean(0), rtol=1e-12, atol=1e-12)


def test_labels_permute():
    """Renaming the classes renames the probabilities."""
    case, order = MODELS[1], torch.tensor([2, 0, 1])
    model, permuted = case.model(), case.model()
    posterior = POSTERIORS["diagonal"](model)
    with torch.no_grad():
        permuted[2].weight.copy_(model[2].weight[order])
        permuted[2].bias.copy_(model[2].bias[order])

    def permute(params):
        return {n: t[order] if n.startswith("2.") else t for n, t in params.items()}

    other = acnml.Diagonal(permute(posterior.mean), permute(posterior.var))
    exact = acnml.Linearised(tolerance=1e-12)
    expected = Acnml(Classifier(model), posterior, exact)(case.x())[:, order]
    actual = Acnml(Classifier(permuted), other, exact)(case.x())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-3, 4.0), st.integers(2, 6), st.integers(0, 1000))
def test_regret_grows_with_alpha(alpha, classes, seed):
    """C(x) = Σ_y max_θ ... increases with α: weaker regularisation fits every label better."""
    model = nn.Linear(2, classes).double()
    posterior = POSTERIORS["diagonal"](model)
    x = normal(1, 2, seed=seed)
    solver = Reference(steps=60, step_size=1 / (1 + alpha))
    low = Acnml(Classifier(model), posterior, solver, alpha).regret(x)
    high = Acnml(Classifier(model), posterior, solver, 1.5 * alpha).regret(x)
    assert 0 < low < high < math.log(classes)


class Failing(nn.Module):
    """Fails in the middle of a forward pass, after writing to a buffer, from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        )
        self.register_buffer("written", torch.zeros(1))
        self.calls = [0]

    def forward(self, x):
        self.written += 1
        self.calls[0] += 1
        if self.calls[0] > 2:
            raise RuntimeError("out of luck")
        return self.body(x)


@each_case
def test_the_users_model_is_untouched(case, build):
    model = dropping(case, 0.5).train()
    next(iter(model.model.children()), model.model).eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = fingerprint(model)
    for predict in all_predictors(model, build):
        predict(case.x())
    assert same(before, fingerprint(model))


def test_the_users_model_is_untouched_when_a_call_fails():
    model = Failing().double().train()
    before = fingerprint(model)
    predict = Acnml(Classifier(model), POSTERIORS["diagonal"](model), Reference(rows_at_once=1))
    with pytest.raises(ValueError, match="out of luck"):
        predict(normal(2, 4))
    assert same(before, fingerprint(model))
    assert model.calls == [0]


@each_case
def test_deterministic_and_without_global_random_state(case, build):
    state = torch.get_rng_state()
    first, again = ([p(case.x()) for p in all_predictors(dropping(case, 0.5), build)] for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@each_case
def test_storage_round_trip(case, build, tmp_path):
    model = dropping(case, 0.5)
    for predict in all_predictors(model, build):
        acnml.save(predict, tmp_path / "predictor.safetensors")
        loaded = acnml.load(tmp_path / "predictor.safetensors", Classifier(model))
        assert type(loaded) is type(predict)
        assert torch.equal(loaded(case.x()), predict(case.x()))


def test_storage_keeps_settings_and_overrides(tmp_path):
    case = MODELS[2]
    model = case.model()
    moved = Classifier(model).at({"norm.running_mean": torch.ones(4).double()})
    predict = Acnml(moved, POSTERIORS["diagonal"](model), Reference(3, 0.1, 2), 0.7, "ignore")
    acnml.save(predict, tmp_path / "predictor.safetensors")
    loaded = acnml.load(tmp_path / "predictor.safetensors", Classifier(model))
    assert (loaded.solver, loaded.alpha) == (predict.solver, 0.7)
    assert torch.equal(loaded(case.x()), predict(case.x()))


def test_dtype_follows_the_model():
    case = MODELS[1]
    posterior = diagonal(dropping(case, 0.5))
    for dtype in (torch.float32, torch.bfloat16):
        for predict in all_predictors(dropping(case, 0.5).to(dtype), lambda _: posterior):
            log_probs = predict(case.x())  # float64 inputs and posterior
            assert log_probs.dtype == torch.float32
            assert (log_probs.exp().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize(("case", "x", "message"), bad_inputs())
def test_refuses_bad_inputs(case: Case, x, message):
    for predict in predictors(case.model(), POSTERIORS["diagonal"]):
        with pytest.raises(ValueError, match=message):
            predict(x)


def test_refuses_what_is_not_a_tensor():
    for predict in predictors(MODELS[4].model(), POSTERIORS["diagonal"]):
        with pytest.raises(TypeError, match=r"input x\[1\] must be a tensor, got list"):
            predict((normal(3, 3), [1, 2, 3]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_refuses_non_finite_logits(value):
    model = dropping(MODELS[1], 0.5)
    frozen_tail = diagonal(model, ["model.0.weight"])
    with torch.no_grad():
        model.model[2].bias[1] = value
    for predict in all_predictors(model, lambda _: frozen_tail):
        with pytest.raises(ValueError, match="NaN or infinite for 3 of 3 inputs"):
            predict(MODELS[1].x())


@pytest.mark.parametrize("rule", [Bma, Acnml, Glm])
@pytest.mark.parametrize(
    ("posterior", "message"),
    [
        (
            posterior_over("0.wieght", 5, 4),
            "no parameter or buffer '0.wieght'; did you mean '0.weight'",
        ),
        (posterior_over("0.weight", 4, 5), r"'0.weight' has shape \(4, 5\), but .* \(5, 4\)"),
    ],
)
def test_refuses_a_posterior_that_does_not_fit(rule, posterior, message):
    with pytest.raises(ValueError, match=message):
        rule(Classifier(MODELS[1].model()), posterior)


@pytest.mark.parametrize("rule", [Bma, Acnml, Glm])
def test_refuses_a_posterior_over_unused_parameters(rule):
    predict = rule(Classifier(Idle()), posterior_over("idle.weight", 3, 4))
    with pytest.raises(
        ValueError, match=r"use none of the posterior's parameters \['idle.weight'\]"
    ):
        predict(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c, q: Acnml(c, q, alpha=0.0), "alpha must be a positive, finite number"),
        (lambda c, q: Acnml(c, q, alpha=math.nan), "alpha must be a positive, finite number"),
        (lambda c, q: Acnml(c, q, on_error="shout"), r"on_error must be one of .*, got 'shout'"),
        (lambda c, q: Acnml(c, q, on_unsolved="shout"), "on_unsolved must be one of .*'raise'"),
        (lambda c, q: acnml.IfComp(c, q, c=0.0), "c must be a positive, finite number"),
        (lambda c, q: Bma(c, q, 0), "samples must be at least 1"),
        (lambda c, q: LogitSampling(0), "samples must be at least 1"),
        (lambda c, q: Bma(c, q, 2, statistics=({"nowhere": torch.ones(1)}, {})), "nowhere"),
    ],
)
def test_refuses_bad_settings(make, message):
    model = MODELS[1].model()
    with pytest.raises(ValueError, match=message):
        make(Classifier(model), diagonal(model))
