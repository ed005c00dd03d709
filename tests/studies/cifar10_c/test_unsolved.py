"""Images for which a solver finds no solution are counted, and predicted uniformly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from studies.engine.predictors import solved_or_uniform


def linear_acnml(scale: float, solver) -> acnml.Acnml:
    with acnml._util.torch_state.seeded(0):
        layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    classifier = acnml.Classifier(layers)
    var = {name: torch.full_like(p, scale) for name, p in classifier.parameters.items()}
    return acnml.Acnml(
        classifier, acnml.Diagonal(classifier.parameters, var), solver, on_unsolved="ignore"
    )


def test_images_without_a_solution_are_counted_and_uniform():
    """A step that is far too long diverges for inputs that are not zero."""
    diverging = linear_acnml(1e30, acnml.Gradient(5, 0.5))
    images = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    saved = solved_or_uniform(diverging, images)
    assert saved["unsolved"].tolist() == [1, 1]
    assert saved["log_lik"].tolist() == [[0, 0], [0, 0]]
    fine = linear_acnml(0.1, acnml.Gradient(5, 0.5))
    saved = solved_or_uniform(fine, images)
    assert saved["unsolved"].tolist() == [0, 0]
    torch.testing.assert_close(saved["log_lik"].log_softmax(1), fine(images))
    with pytest.raises(ValueError, match="the model failed on inputs"):
        solved_or_uniform(fine, torch.zeros(2, 5))
