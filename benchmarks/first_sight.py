"""Measure what the checks on first sight of a model cost (`python -m benchmarks.first_sight`).

A prediction for 200 inputs with the checks is compared with one without them, of the same
predictor. Times are CPU times of one thread; both take turns, and the fastest of several rounds
counts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import acnml
from acnml import Acnml, Classifier, Map
from acnml._util.seeding import seeded
from acnml.classifier import Findings
from acnml.predictors import Predictor
from studies.models import MODELS
from studies.models.mlp import mlp

INPUTS, ROUNDS = 200, 15


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return networks with inputs."""
    with seeded(0):
        small = nn.Sequential(
            *(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        )
        return {
            "ResNet-20": (MODELS["resnet20"].untrained(seed=0), torch.randn(INPUTS, 3, 32, 32)),
            "MLP 784-1200-1200-10": (mlp(10), torch.randn(INPUTS, 784)),
            "MLP 20-64-64-10": (small, torch.randn(INPUTS, 20)),
        }


def predictors(network: nn.Module, x: Tensor) -> dict[str, Predictor]:
    """Return predictors of a network; those of all layers only where they take seconds."""
    classifier = Classifier(network)
    last = acnml.fit_kfac_laplace(
        classifier, [x], 1.0, parameters=[acnml.last_linear(network)], progress=False
    )
    found: dict[str, Predictor] = {
        "Map": Map(classifier),
        "Acnml, last layer": Acnml(classifier, last, alpha=0.1),
    }
    if sum(parameter.numel() for parameter in network.parameters()) < 10_000:
        q = acnml.fit_kfac_laplace(classifier, [x], 1.0, progress=False)
        found["Acnml, all layers"] = Acnml(classifier, q, alpha=0.1, on_unsolved="ignore")
    return found


def cost(predict: Predictor, classifier: Classifier, x: Tensor) -> tuple[float, float]:
    """Return the CPU seconds of a prediction without and with the checks."""

    def checked() -> None:
        # What was found out about the model is forgotten, except what no check depends on.
        known, classifier.findings = classifier.findings, Findings()
        classifier.findings.parting.update(known.parting)
        classifier.findings.only_linear.update(known.only_linear)
        predict(x)

    runs: dict[bool, Callable[[], object]] = {False: lambda: predict(x), True: checked}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for with_checks, run in runs.items():
            start = time.process_time()
            run()
            best[with_checks] = min(best[with_checks], time.process_time() - start)
    return best[False], best[True]


def main() -> None:
    """Print one line for every network and predictor."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, (network, x) in networks().items():
        for kind, predict in predictors(network.eval(), x).items():
            assert isinstance(predict, (Map, Acnml))
            plain, checked = cost(predict, predict.classifier, x)
            share, extra = checked / plain - 1, 1000 * (checked - plain)
            print(
                f"{name:21} {kind:18} {1000 * plain:8.2f} ms, checks {extra:6.2f} ms, {share:6.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
