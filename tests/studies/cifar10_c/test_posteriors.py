"""The study's posteriors: curvature of all images, and heads for a tempered likelihood."""

from __future__ import annotations

import torch
from torch import nn

import acnml
from stores import store_in
from studies.cifar10_c import methods
from studies.cifar10_c.maddox import kfac_of_one_batch
from studies.engine.choose import chosen
from studies.engine.predictors import predictor
from studies.engine.workshop import Finished, Workshop

from .tiny import TRAIN


def test_kfac_of_one_batch_has_the_factors_of_the_empirical_fisher():
    """Without dropout and batch norm, train mode changes nothing: the library's factors, rescaled.

    Theirs sum over the data, and G over positions too.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    labels, n, data = torch.arange(6) % 3, 6, 1000
    with acnml._util.torch_state.seeded(0):
        layers = nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3, bias=False)
        classifier = acnml.Classifier(nn.Sequential(*layers).double())
    found = kfac_of_one_batch(classifier, x, labels, data)
    fisher = acnml.fit.EmpiricalFisher()
    curvature = acnml.fit.fit_curvature(classifier, [(x, labels)], fisher=fisher)
    for block, factors, positions in zip(found.blocks, curvature.factors, (4, 1), strict=True):
        assert block.layer == factors.layer
        damping = (5e-4 / positions) ** 0.5
        _, A, G = factors.normalised
        A, G = A / n**0.5, G / n**0.5 / positions
        A, G = (matrix + damping * torch.eye(len(matrix)) for matrix in (A, G))
        v = torch.randn(len(G), len(A), generator=generator, dtype=torch.float64)
        torch.testing.assert_close(data**2 * G @ block.cov_mv(v) @ A, v)


def test_kfac_of_one_batch_is_measured_in_train_mode():
    """Batch norm normalises by the batch, and the user's network stays as it was."""
    generator = torch.Generator().manual_seed(0)
    x, labels = 5 + 3 * torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (block,) = kfac_of_one_batch(acnml.Classifier(model), x, labels, 1).blocks
    # Gradients at the logits sum to zero, so that the smallest eigenvalue of G is the damping.
    damping = 5e-4**0.5
    values = 1 / (block.var[0] * damping)
    A = block.input_basis @ values.diag() @ block.input_basis.T - damping * torch.eye(5)
    torch.testing.assert_close(A.diagonal(), torch.ones(5), rtol=1e-3, atol=1e-3)
    assert not model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_the_curvature_counts_all_training_images(finished, tiny, study, data):
    """Measured on a third of the images, it is scaled to all of them."""
    out, _ = finished
    makers = Workshop(study, data, Finished(store_in(out, tiny)), 0)
    few = data.train.inputs[:20], data.train.labels[:20]
    batch = [(makers.prepared(methods.SWA, few[0]), few[1])]
    weights, fitted = study.grounds[methods.KFAC].artefacts(methods.BMA_KFAC, makers)
    classifier = makers.classifier(methods.SWA, weights)
    measured = acnml.fit.fit_curvature(classifier, batch, progress=False)
    found = fitted.load_saved()
    expected = measured.eigenvalues().sum() * (TRAIN / 20)
    torch.testing.assert_close(found.eigenvalues().sum(), expected, rtol=1e-4, atol=1e-6)


def test_the_tempered_head_is_fitted_to_the_tempered_likelihood(finished, tiny, study, data):
    out, _ = finished
    makers = Workshop(study, data, Finished(store_in(out, tiny)), 0)
    ready = chosen(methods.ACNML_HEAD_TEMPERED, makers)
    classifier = makers.classifier(methods.SWA, makers.weights(methods.SWA)).tempered(
        ready.likelihood
    )
    batch = [(makers.prepared(methods.SWA, data.train.inputs), data.train.labels)]
    expected = acnml.fit_laplace(
        classifier, batch, prior_precision=ready.value, layers="last", progress=False
    )
    inputs = makers.prepared(methods.SWA, data.test.inputs[:5])
    ours = predictor(ready, makers)(inputs)
    torch.testing.assert_close(ours, acnml.Acnml(classifier, expected)(inputs), **CLOSELY)


CLOSELY = {"rtol": 1e-3, "atol": 1e-3}  # both have summed in single precision
