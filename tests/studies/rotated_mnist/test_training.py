"""Training a mean field, and curvature that is kept on disk."""

from __future__ import annotations

import pytest
import torch

import acnml
from studies.data import Labelled
from studies.store import Content
from studies.store.work import mixed
from studies.training import BayesByBackprop, Nobody, train_mean_field


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
