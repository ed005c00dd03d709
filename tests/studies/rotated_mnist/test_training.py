"""Training a mean field and at a schedule's rates, and curvature that is kept on disk."""

from __future__ import annotations

import pytest
import torch
from studies.rotated_mnist.mean_field import MeanField
from studies.rotated_mnist.training import Learner, constant, learn
from studies.rotated_mnist.workshop import Workshop
from studies.study.artefacts import Finished
from studies.study.saved import curvature_content, load_curvature

import acnml
from stores import store_in

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


def test_curvature_survives_the_disk(finished, data):
    out, _ = finished
    workshop = Workshop(TINY, data, Finished(store_in(out, TINY)), 0)
    network = workshop.classifier(workshop.network())
    expected = acnml.kronecker_curvature(network, [tuple(data.train)], progress=False)
    found = load_curvature(workshop.curvature())
    assert [f.layer for f in found.factors] == [f.layer for f in expected.factors]
    for ours, theirs in zip(found.factors, expected.factors, strict=True):
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-3, atol=1e-4)
    assert curvature_content(found).tensors.keys() == workshop.curvature().load().keys()


def test_learning_rates_follow_their_schedule(data):
    """SGD on a quadratic: the steps add up to the schedule's rates."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    class NoWork:
        def resume(self):
            return None

        def progress(self, done, total):
            pass

        def checkpoint(self, content):
            pass

    learner = Learner(module, optimizer, lambda x, y, g: module.weight.sum(), constant)
    learn(learner, data.train, 2, 100, 0, NoWork())
    assert module.weight.item() == pytest.approx(-0.1 * 2 * 4)
