"""Tempered predictors and classifiers: equalities, invalid arguments, storage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import acnml
from acnml import Acnml, Classifier, Diagonal, Map, Tempered
from acnml.storage import StorageError
from cases import LINEAR, MLP, MODELS, diagonal
from predicting import FINE


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 50.0), st.sampled_from(MODELS))
def test_tempering_map_tempers_the_model(temperature, case):
    classifier = Classifier(case.model())
    torch.testing.assert_close(
        Tempered(Map(classifier), temperature)(case.x()),
        Map(classifier.tempered(temperature))(case.x()),
        rtol=1e-9,
        atol=1e-11,
    )


def test_temperature_moves_between_certain_and_uniform():
    predict = Map(Classifier(MLP.model()))
    probs = [Tempered(predict, t)(MLP.x()).exp() for t in (0.001, 0.5, 1.0, 2.0, 1e12)]
    confidences = torch.stack([p.max(-1).values for p in probs])
    assert (confidences.diff(dim=0) < 0).all()
    assert (confidences[0] > 0.99).all()
    torch.testing.assert_close(probs[-1], torch.ones(3, 3).double() / 3, rtol=0, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_refuses_temperatures_that_are_not_positive(temperature):
    classifier = Classifier(MLP.model())
    for temper in (classifier.tempered, lambda t: Tempered(Map(classifier), t)):
        with pytest.raises(ValueError, match="temperature must be a positive, finite number"):
            temper(temperature)


def test_inputs_without_an_answer_stay_without_one():
    """NaN of the predictor is not due to the temperature."""
    model, x = MLP.model(), MLP.x(4)
    x[2, 1] = math.nan
    flagging = Acnml(Classifier(model), diagonal(model), alpha=0.1, on_error="flag")
    good = torch.tensor([0, 1, 3])
    log_probs = Tempered(flagging, 2.0)(x)
    assert log_probs[2].isnan().all()
    torch.testing.assert_close(log_probs[good], Tempered(flagging, 2.0)(x[good]), **FINE)


def test_tempered_classifiers_compose():
    model, moved = MLP.model(), {"2.bias": torch.ones(3).double()}
    plain, x = Classifier(model), MLP.x()
    assert plain.temperature == 1.0
    twice = plain.tempered(2.0).tempered(3.0)
    torch.testing.assert_close(twice.logits(x), plain.logits(x) / 6, **FINE)
    for view in (plain.at(moved).tempered(2.0), plain.tempered(2.0).at(moved)):
        torch.testing.assert_close(view.logits(x), plain.at(moved).logits(x) / 2, **FINE)
    assert plain.temperature == 1.0
    assert plain.tempered(49.0).untempered().temperature == 1.0
    assert twice.untempered().agrees_with(plain)
    assert [repr(c) for c in (plain, twice)] == [
        "Classifier(Sequential)",
        "Classifier(Sequential, temperature=6)",
    ]


def test_acnml_of_a_tempered_model_is_that_of_the_model_with_smaller_last_weights():
    """Logits W a / T: the same as weights W / T, whose variances are divided by T²."""
    model, T = LINEAR.model(), 2.0
    posterior = diagonal(model)
    shrunk = Diagonal(
        {n: t / T for n, t in posterior.mean.items()},
        {n: t / T**2 for n, t in posterior.var.items()},
    )
    torch.testing.assert_close(
        Acnml(Classifier(model).tempered(T), posterior)(LINEAR.x()),
        Acnml(Classifier(model), shrunk)(LINEAR.x()),
        **FINE,
    )


def test_storage_keeps_the_classifiers_temperature(tmp_path):
    model, path = MLP.model(), tmp_path / "acnml.safetensors"
    predict = Acnml(Classifier(model).tempered(1.7), diagonal(model))
    acnml.save(predict, path)
    for given_classifier in (Classifier(model), Classifier(model).tempered(1.7)):
        loaded = acnml.load(path, given_classifier)
        assert loaded.classifier.temperature == 1.7
        assert torch.equal(loaded(MLP.x()), predict(MLP.x()))
    with pytest.raises(
        StorageError, match=r"stored with temperature 1\.7, but the given .* has 3;"
    ):
        acnml.load(path, Classifier(model).tempered(3.0))


def test_temperatures_too_small_for_the_precision_are_refused():
    with pytest.raises(ValueError, match="raise the temperature"):
        Tempered(Map(Classifier(MLP.model())), 1e-310)(MLP.x())
