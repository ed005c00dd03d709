"""pNML's closed form is a refit by least squares of one label's weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import acnml
from acnml import Classifier, Map
from acnml.calibration.calibrator import closed_form
from cases import CONV, MLP, MODELS, normal


def design(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the last layer of the MLP receives, with a 1 for the bias."""
    hidden = model[:2](x).detach()
    return torch.cat([hidden, torch.ones(len(x), 1).double()], dim=1)


@pytest.mark.parametrize("temperature", [1.0, 1.8])
@pytest.mark.parametrize("ridge", [1e-9, 0.5])
def test_it_is_a_least_squares_refit_of_one_labels_weights(ridge, temperature):
    """The layer keeps its outputs on the training data, and log p_y at the input should be 0."""
    model, train, x = MLP.model(), normal(30, 4, seed=5), MLP.x(4)
    predict = acnml.fit_pnml(Classifier(model).tempered(temperature), [train], ridge=ridge)
    A, queries = design(model, train), design(model, x)
    weights = torch.cat([model[2].weight, model[2].bias[:, None]], dim=1).detach() / temperature
    log_lik = predict.log_lik(x)
    for a, found in zip(queries, log_lik, strict=True):
        logits = weights @ a
        for y in range(3):
            # Rows: the training data, the query, and the ridge towards the weights there are.
            rows = torch.cat([A, a[None], math.sqrt(ridge) * torch.eye(6).double()])
            goal = logits[y] - logits.log_softmax(-1)[y]
            targets = [A @ weights[y], goal[None], math.sqrt(ridge) * weights[y]]
            refitted = torch.linalg.lstsq(rows, torch.cat(targets)[:, None]).solution[:, 0]
            moved = logits.clone()
            moved[y] = refitted @ a
            torch.testing.assert_close(found[y], moved.log_softmax(-1)[y], rtol=1e-8, atol=1e-9)


def test_outside_the_span_of_the_data_every_output_can_be_had():
    """h → 1 and the genie probability is 1 / (2 - p), also of a label with p = 0."""
    model = nn.Linear(3, 3, bias=False).double()
    train = torch.cat([normal(10, 2), torch.zeros(10, 1).double()], dim=1)
    x = torch.tensor([[0.3, -0.2, 1.0]]).double()
    predict = acnml.fit_pnml(Classifier(model), [train], ridge=1e-12)
    p = Map(Classifier(model))(x).exp()
    torch.testing.assert_close(predict.log_lik(x).exp(), 1 / (2 - p), rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.floats(0, 1e8), st.floats(0.1, 300), st.integers(0, 1000))
def test_properties_for_any_logits_and_leverage(classes, leverage, scale, seed):
    logits = scale * normal(3, classes, seed=seed)
    plain = logits.log_softmax(-1)
    found = closed_form(logits, torch.full((3,), leverage).double())
    assert found.isfinite().all()
    assert (found <= 1e-12).all()
    assert (found >= plain - 1e-9).all()  # no label is explained worse than before
    regret = found.logsumexp(-1)
    assert ((regret > -1e-9) & (regret <= math.log(classes) + 1e-9)).all()
    assert torch.equal(found.argsort(-1), plain.argsort(-1)) or bool((plain.diff() == 0).any())
    larger = closed_form(logits, torch.full((3,), 2 * leverage + 1e-3).double())
    assert (larger >= found - 1e-9).all()


def test_for_unlikely_labels_it_is_a_temperature():
    logits = torch.tensor([[0.0, -40.0, -60.0]]).double()
    found = closed_form(logits, torch.tensor([0.5]).double())
    torch.testing.assert_close(found[0, 1:], logits[0, 1:] / 1.5, rtol=1e-6, atol=0)


def test_a_confident_network_keeps_its_regret():
    """1 - p of the likeliest label must not cancel: the regret is that of exact arithmetic."""
    logits = torch.tensor([[0.0, -45.0]]).double()
    found = closed_form(logits, torch.tensor([1.0]).double())
    p = math.exp(-45) / (1 + math.exp(-45))
    expected = [-math.log1p((1 - p) ** -0.5 * p), -math.log1p(p**-0.5 * (1 - p))]
    exact = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found[0], exact, rtol=1e-12, atol=0)


def test_no_weight_is_the_network_and_batches_do_not_matter():
    model, train, x = MLP.model(), normal(30, 4, seed=5), MLP.x(6)
    predict = acnml.fit_pnml(Classifier(model), [train[:7], train[7:]], c=1e-12)
    torch.testing.assert_close(predict(x), Map(Classifier(model))(x), rtol=0, atol=1e-9)
    whole = acnml.fit_pnml(Classifier(model), train)
    torch.testing.assert_close(predict.leverage(x), whole.leverage(x), rtol=1e-8, atol=0)
    one_by_one = torch.cat([whole(x[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(whole(x), one_by_one, rtol=1e-11, atol=1e-12)


def test_leverages_of_the_training_data_sum_to_the_number_of_weights():
    model, train = MLP.model(), normal(40, 4, seed=5)
    predict = acnml.fit_pnml(Classifier(model), train, ridge=1e-10)
    assert predict.leverage(train).sum().item() == pytest.approx(6, rel=1e-6)


def test_it_is_stored_and_takes_arrays(tmp_path):
    model, x = CONV.model(), CONV.x(3)
    predict = acnml.fit_pnml(Classifier(model), [CONV.x(20)], c=0.5)
    acnml.save(predict, tmp_path / "pnml.safetensors")
    loaded = acnml.load(tmp_path / "pnml.safetensors", Classifier(model))
    assert torch.equal(loaded(x), predict(x))
    assert (loaded.regret(x.numpy()) == predict.regret(x).numpy()).all()
    assert predict.regret(x).dtype == torch.float64
    single = acnml.fit_pnml(Classifier(CONV.model().float()), [CONV.x(20)], c=0.5)
    assert single(x.float()).dtype == torch.float32
    torch.testing.assert_close(single(x.float()).double(), predict(x), rtol=1e-3, atol=1e-3)


def test_a_ridge_that_rounding_loses_is_refused():
    x = 1e9 * torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="a ridge of 1 is lost in rounding: choose a larger one"):
        acnml.fit_pnml(Classifier(nn.Linear(8, 3).double()), x, ridge=1.0)
    acnml.fit_pnml(Classifier(nn.Linear(8, 3).double()), x)


def test_refusals():
    model = MODELS[1].model()
    classifier = Classifier(model)
    with pytest.raises(ValueError, match=r"covers a last Linear layer alone, not \['0.weight'"):
        acnml.fit_pnml(classifier, [MLP.x()], layers=[model])
    with pytest.raises(ValueError, match="the logits are not the outputs of '0' alone"):
        acnml.fit_pnml(classifier, [MLP.x()], layers=[model[0]])
    with pytest.raises(ValueError, match="ridge must be a positive"):
        acnml.fit_pnml(classifier, [MLP.x()], ridge=0.0)
    with pytest.raises(ValueError, match="c must be a positive"):
        acnml.fit_pnml(classifier, [MLP.x()], c=-1.0)
