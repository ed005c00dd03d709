"""Measure how the run time depends on the number of classes and on the training set size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import acnml
from acnml import Classifier, Diagonal, Linearised
from acnml._util.seeding import seeded
from benchmarks.timing import fastest

CLASSES = (2, 5, 10, 20, 50, 100)
TRAINING = (500, 2_000, 8_000)


def against_classes() -> list[dict[str, Any]]:
    """Measure a 256-256-K network with a diagonal posterior, in seconds per input."""
    rows = []
    for classes in CLASSES:
        classifier, x = _network(classes), torch.rand(16, 256)
        names = [name for name, _ in classifier.model.named_parameters()]
        mean = classifier.copy_parameters(names)
        wide = Diagonal(mean, {n: torch.full_like(t, 1e-3) for n, t in mean.items()})
        head = list(mean)[-2:]
        last = Diagonal({n: mean[n] for n in head}, {n: wide.var[n] for n in head})
        rows += [_row("whole network", classes, classifier, wide, x)]
        rows += [_row("last layer", classes, classifier, last, x)]
    return rows


def against_training_images() -> list[dict[str, Any]]:
    """Measure predictions with posteriors fitted on increasing numbers of images."""
    classifier, rows = _network(10), []
    for count in TRAINING:
        with seeded(0):
            data = [(torch.rand(count, 256), torch.randint(0, 10, (count,)))]
        posterior = acnml.fit_kfac_laplace(classifier, data, 10.0, progress=False)
        rows.append(_row("whole network", count, classifier, posterior, torch.rand(16, 256)))
    return rows


def _network(classes: int) -> Classifier:
    with seeded(0):
        return Classifier(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, classes)))


def _row(
    name: str, count: int, classifier: Classifier, posterior: acnml.Posterior, x: torch.Tensor
) -> dict[str, Any]:
    solver, many = Linearised(), x.repeat(20, 1)

    def solve() -> object:
        with torch.no_grad():
            return solver.log_lik(classifier, posterior, many)

    solve()  # a warm-up run: it allocates memory and selects kernels
    seconds = fastest({"solve": solve}, 5)["solve"]
    return {"name": name, "count": count, "seconds": seconds / len(many)}
