"""The study's posteriors: curvature of all images, and heads for a tempered likelihood."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from studies.cifar10_c.choices import chosen
from studies.cifar10_c.posteriors import _Drawn, curvature, rescaled, sampling
from studies.cifar10_c.predictors import predictor
from studies.cifar10_c.workshop import Workshop
from studies.study.artefacts import Finished
from studies.study.saved import load_curvature
from torch import nn

import acnml
from stores import store_in
from studies.cifar10_c import methods

from .tiny import TRAIN


def test_rescaling_is_repeating_the_data():
    """Curvature sums over the data: three times the data have three times the curvature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    with acnml._util.seeding.seeded(0):
        classifier = acnml.Classifier(nn.Linear(4, 3).double())
    once, thrice = (
        acnml.kronecker_curvature(classifier, [(x.repeat(n, 1), torch.zeros(5 * n).long())])
        for n in (1, 3)
    )
    for scaled, expected in zip(rescaled(once, 3).factors, thrice.factors, strict=True):
        torch.testing.assert_close(scaled.inputs, expected.inputs)
        torch.testing.assert_close(scaled.gradients, expected.gradients)


def test_the_curvature_counts_all_training_images(finished, tiny, data):
    """Measured on a third of the images, it is scaled to all of them."""
    out, _ = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    few = data.train.images[:20], data.train.labels[:20]
    batch = [(makers.inputs(few[0]), few[1])]
    classifier = makers.classifier(makers.swa())
    measured = acnml.kronecker_curvature(classifier, batch, progress=False)
    found = load_curvature(curvature(makers))
    expected = measured.eigenvalues().sum() * (TRAIN / 20)
    torch.testing.assert_close(found.eigenvalues().sum(), expected, rtol=1e-4, atol=1e-6)


def test_the_tempered_head_is_fitted_to_the_tempered_likelihood(finished, tiny, data):
    out, _ = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    ready = chosen(methods.ACNML_HEAD_TEMPERED, makers)
    classifier = makers.classifier(makers.swa()).tempered(ready.likelihood)
    head = [acnml.last_linear(classifier.model)]
    batch = [(makers.inputs(data.train.images), data.train.labels)]
    expected = acnml.fit_kfac_laplace(classifier, batch, ready.value, head, progress=False)
    inputs = makers.inputs(data.clean.images[:5])
    ours = predictor(ready, makers)(inputs)
    torch.testing.assert_close(ours, acnml.Acnml(classifier, expected)(inputs), **CLOSELY)


def test_every_sample_has_images_of_its_own_for_batch_norm(tiny, data, tmp_path):
    makers = Workshop(tiny, data, Finished(store_in(tmp_path, tiny)), 0)
    draws = _Drawn.by(makers)
    first, second = (torch.cat([labels for _, labels in draws]) for _ in range(2))
    assert len(first) == len(second) == tiny.batch_norm_images
    assert not torch.equal(first, second)
    again = torch.cat([labels for _, labels in _Drawn.by(makers)])
    torch.testing.assert_close(again, first)


@pytest.mark.parametrize("method", [methods.ACNML_HEAD_ALPHA, methods.BMA_KFAC])
def test_predictions_depend_on_a_prior_precision_that_is_given(tiny, data, tmp_path, method):
    def needed(prior):
        study = replace(tiny, curvature=replace(tiny.curvature, prior_precision=prior))
        return sampling(method, Workshop(study, data, Finished(store_in(tmp_path, study)), 0))

    assert needed(5.0) != needed(50.0)


CLOSELY = {"rtol": 1e-3, "atol": 1e-3}  # both have summed in single precision
