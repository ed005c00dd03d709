"""Measure the peak memory of predictions against the budget given (`python -m benchmarks.peaks`).

Writes docs/results/measurements/peaks.csv.

Every peak is that of a process of its own, above what the process held after a first prediction of
two inputs. It therefore includes the buffers of torch's matrix products. Linux only.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from acnml import Acnml, Classifier, Diagonal, Gradient, Linearised, fit_laplace
from acnml.posteriors import Posterior
from benchmarks.recording import MEASUREMENTS, record
from benchmarks.timing import peak as peak_of

INPUTS = 256
FEWER, FEWEST = 32, 4  # with many classes, where every input has many rows


def mlp() -> tuple[nn.Module, Tensor]:
    """A multilayer perceptron with 10 classes."""
    layers = (nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    return nn.Sequential(*layers), torch.randn(INPUTS, 100)


def cnn() -> tuple[nn.Module, Tensor]:
    """A small convolutional network."""
    body = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(*body, *head), torch.randn(INPUTS, 3, 32, 32)


def many_classes() -> tuple[nn.Module, Tensor]:
    """A multilayer perceptron with 200 classes."""
    layers = (nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 200))
    return nn.Sequential(*layers), torch.randn(FEWER, 50)


def thousand_classes() -> tuple[nn.Module, Tensor]:
    """A multilayer perceptron with 1,000 classes."""
    layers = (nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 1000))
    return nn.Sequential(*layers), torch.randn(FEWEST, 50)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "200 classes": many_classes,
    "1000 classes": thousand_classes,
}
SOLVERS: dict[str, Linearised | Gradient] = {
    "logits": Linearised(),
    "Linearised": Linearised("network", polish=2),
    "Gradient": Gradient(),
}
POSTERIORS = ("diagonal", "kronecker")
LAST_LAYER = "last layer"  # a Kronecker posterior, solved in logit space
BUDGETS = (100, 400)  # MB
BUDGETS_OF_FEWER = (20, 100)


def main() -> None:
    """Start a process for every combination, or with arguments measure one in this process."""
    if sys.argv[1:]:
        print(measure(*sys.argv[1:]))
        return
    rows: list[dict[str, object]] = []
    small, heads = ("mlp", "cnn"), ("200 classes", "1000 classes")
    for each in (
        *itertools.product(small, SOLVERS, POSTERIORS, map(str, BUDGETS)),
        *itertools.product(heads[:1], SOLVERS, POSTERIORS, map(str, BUDGETS_OF_FEWER)),
        *itertools.product(heads, ["Linearised"], [LAST_LAYER], map(str, BUDGETS_OF_FEWER)),
    ):
        command = [sys.executable, "-m", "benchmarks.peaks", *each]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        network, solver, posterior, budget = each
        case = {"network": network, "solver": solver, "posterior": posterior, "budget": budget}
        peak = float(done.stdout)
        rows.append({**case, "peak": peak, "share": peak / int(budget)})
        print(*rows[-1].values(), flush=True)
    record(MEASUREMENTS / "peaks.csv", rows)


def measure(network: str, solver: str, kind: str, megabytes: str) -> float:
    """Return the peak of one combination, in megabytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = NETWORKS[network]()
    classifier, memory = Classifier(model), int(float(megabytes) * 1e6)
    mean = classifier.copy_parameters([name for name, _ in model.named_parameters()])
    q: Posterior
    if kind == "diagonal":
        q = Diagonal(mean, {name: torch.full_like(tensor, 1e-3) for name, tensor in mean.items()})
    else:
        covered = "last" if kind == LAST_LAYER else None
        data = [(x[:64], torch.zeros(len(x[:64]), dtype=torch.long))]
        q = fit_laplace(classifier, data, prior_precision=1.0, layers=covered, progress=False)
    _solve(classifier, q, replace(SOLVERS[solver], memory=1), x[:2])
    solver_within = replace(SOLVERS[solver], memory=memory)
    return peak_of(lambda: _solve(classifier, q, solver_within, x)) / 1e6


def _solve(classifier: Classifier, q: Posterior, solver: Linearised | Gradient, x: Tensor) -> None:
    predict = Acnml(classifier, q, solver, alpha=0.1, on_unsolved="ignore")
    (predict if solver == replace(Linearised(), memory=solver.memory) else predict.solve)(x)


if __name__ == "__main__":
    main()
