"""The names that all examples in docstrings may use, as docs/reference/index.md says."""

from __future__ import annotations

import numpy
import torch

import acnml


def example_names() -> dict[str, object]:
    """Return modules, a network of 4 inputs and 3 classes with a posterior, and data for it."""
    classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    x, labels = torch.randn(100, 4), torch.randint(3, (100,))
    posterior = acnml.fit_laplace(classifier, x)
    names = {"acnml": acnml, "np": numpy, "torch": torch, "nn": torch.nn}
    return names | {"classifier": classifier, "posterior": posterior, "x": x, "labels": labels}
