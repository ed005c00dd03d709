"""Training a mean field, and curvature that is kept on disk."""

from __future__ import annotations

import pytest
import torch

import acnml
from stores import store_in
from studies.data import Labelled
from studies.engine.workshop import Finished, Workshop
from studies.rotated_mnist import methods
from studies.store import Content
from studies.store.work import mixed
from studies.training import BayesByBackprop, Nobody, train_mean_field

from .tiny import TINY


def test_the_mean_field_is_that_of_the_library():
    """One epoch gives what the library's trainer gives for the same batches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=generator)
    torch.manual_seed(0)
    network, settings = torch.nn.Linear(4, 3).double(), BayesByBackprop(1, 10, 0.01, 10.0, 0.2)
    content = train_mean_field(
        network, Labelled(x, y), lambda inputs, _: inputs, settings, 5, Nobody()
    )
    classifier = acnml.Classifier(network)
    trainer = acnml.fit.BayesByBackprop(classifier, 30, 0.2, 0.01, 0.1, seed=5)
    order = torch.Generator().manual_seed(mixed(5, 0))
    for rows in torch.randperm(30, generator=order).split(10):
        trainer.step(x[rows], y[rows])
    expected = Content.of_saved(trainer.posterior()).tensors
    assert content.tensors.keys() == expected.keys()
    assert all(torch.equal(content.tensors[name], expected[name]) for name in expected)
    std = torch.cat([v.sqrt().flatten() for v in trainer.posterior().var.values()]).mean().item()
    assert content.facts == {"epochs": 1, "std": [pytest.approx(std / 0.2)]}


def test_curvature_survives_the_disk(finished, study, data):
    out, _ = finished
    workshop = Workshop(study, data, Finished(store_in(out, TINY)), 0)
    fixed = methods.ACNML_KFAC
    weights, fitted = study.grounds[methods.KFAC].artefacts(fixed, workshop)
    network = workshop.classifier(methods.NETWORK, weights)
    expected = acnml.fit.fit_curvature(network, [tuple(data.train)], progress=False)
    found = fitted.load_saved()
    assert [f.layer for f in found.factors] == [f.layer for f in expected.factors]
    for ours, theirs in zip(found.factors, expected.factors, strict=True):
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-3, atol=1e-4)
