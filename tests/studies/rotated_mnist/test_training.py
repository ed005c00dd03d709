"""Training a mean field, and curvature that is kept on disk."""

from __future__ import annotations

import torch

import acnml
from stores import store_in
from studies.engine.grounds import curvature_content, load_curvature
from studies.engine.workshop import Finished, Workshop
from studies.rotated_mnist import methods
from studies.training.mean_field import MeanField

from .tiny import TINY


def test_the_mean_field_is_that_of_the_library():
    """One epoch gives what `fit_bayes_by_backprop` gives, to rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=generator)
    torch.manual_seed(0)
    classifier = acnml.Classifier(torch.nn.Linear(4, 3).double())
    batches = list(zip(x.split(10), y.split(10), strict=True))
    expected = acnml.fit_bayes_by_backprop(classifier, batches, 1, 0.2, 0.01, seed=5)
    field, noise = MeanField(classifier, 0.2), torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(field.parameters(), lr=0.01, fused=True)
    for images, labels in batches:
        optimizer.zero_grad()
        field.loss(images, labels, 30, noise).backward()
        optimizer.step()
    found = field.posterior()
    for name in expected.mean:
        torch.testing.assert_close(found.mean[name], expected.mean[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.var[name], expected.var[name], rtol=1e-9, atol=1e-12)


def test_curvature_survives_the_disk(finished, study, data):
    out, _ = finished
    workshop = Workshop(study, data, Finished(store_in(out, TINY)), 0)
    fixed = methods.ACNML_KFAC
    weights, fitted = study.grounds[methods.KFAC].artefacts(fixed, workshop)
    network = workshop.classifier(methods.NETWORK, weights)
    expected = acnml.kronecker_curvature(network, [tuple(data.train)], progress=False)
    found = load_curvature(fitted)
    assert [f.layer for f in found.factors] == [f.layer for f in expected.factors]
    for ours, theirs in zip(found.factors, expected.factors, strict=True):
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-3, atol=1e-4)
    assert curvature_content(found).tensors.keys() == fitted.load().keys()
