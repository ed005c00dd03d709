"""Measure what the checks on first sight of a model cost (`python -m benchmarks.first_sight`).

Writes docs/results/measurements/first-sight.csv.

The time inside the checks is compared with that of a prediction for 200 inputs without them, and
with a run of the network on two inputs, which is the least that a check can do. Times are CPU times
of one thread; all take turns, and the fastest of several rounds counts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import acnml
from acnml import Acnml, Classifier, Map, problem
from acnml._engine import trust
from acnml._util.torch_state import seeded
from acnml.classifier import Findings
from acnml.predictors import Predictor
from benchmarks.recording import MEASUREMENTS, record
from studies.models import MODELS
from studies.models.mlp import mlp

INPUTS = 200
ROUNDS, SECONDS = 15, 4.0  # at least so many rounds, and more while there is time


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
    last = acnml.fit_laplace(
        classifier,
        [x],
        prior_precision=1.0,
        layers="last",
        progress=False,
    )
    found: dict[str, Predictor] = {
        "Map": Map(classifier),
        "Acnml, last layer": Acnml(classifier, last, alpha=0.1),
    }
    if sum(parameter.numel() for parameter in network.parameters()) < 10_000:
        q = acnml.fit_laplace(classifier, [x], prior_precision=1.0, progress=False)
        found["Acnml, all layers"] = Acnml(classifier, q, alpha=0.1, on_unsolved="ignore")
    return found


def cost(predict: Predictor, classifier: Classifier, x: Tensor) -> dict[str, float]:
    """Return the CPU seconds of a prediction, of the checks, and of a run of two rows."""

    def checked() -> None:
        # What was found out about the model is forgotten, except what no check depends on.
        known, classifier.findings = classifier.findings, Findings()
        classifier.findings.only_linear.update(known.only_linear)
        predict(x)

    best = {"plain": float("inf"), "checks": float("inf"), "two_rows": float("inf")}
    begun, rounds = time.process_time(), 0
    while rounds < ROUNDS or time.process_time() - begun < SECONDS:
        rounds += 1
        with torch.no_grad():
            taken = {"plain": seconds(lambda: predict(x))}
            taken["two_rows"] = seconds(lambda: classifier.model(x[:2]))
        with timed_checks() as inside:
            checked()
        taken["checks"] = sum(inside)
        best = {name: min(best[name], taken[name]) for name in best}
    return best


def in_columns(plain: float, checks: float, two_rows: float) -> dict[str, float]:
    """Return the columns of the results: milliseconds, and shares of a prediction."""
    return {
        "plain_ms": 1000 * plain,
        "checks_ms": 1000 * checks,
        "two_rows_ms": 1000 * two_rows,
        "beyond_two_rows_ms": 1000 * (checks - two_rows),
        "share": checks / plain,
        "share_of_two_rows": two_rows / plain,
    }


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


@contextmanager
def timed_checks() -> Iterator[list[float]]:
    """Collect the CPU times of all calls of the checks."""
    inside: list[float] = []

    def timed(check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            start = time.process_time()
            found = check(*args, **settings)
            inside.append(time.process_time() - start)
            return found

        return run

    with ExitStack() as stack:
        for module in (problem, trust):
            stack.enter_context(mock.patch.object(module, "check", timed(trust.check)))
        yield inside


def main() -> None:
    """Measure every network and predictor."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name, (network, x) in networks().items():
        for kind, predict in predictors(network.eval(), x).items():
            assert isinstance(predict, (Map, Acnml))
            found = cost(predict, predict.classifier, x)
            row = {"network": name, "predictor": kind, **in_columns(**found)}
            print(row, flush=True)
            rows.append(row)
    record(MEASUREMENTS / "first-sight.csv", rows)


if __name__ == "__main__":
    main()
