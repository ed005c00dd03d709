"""Posteriors over all layers: the linearised network against its alternatives, in one run.

python -m benchmarks.all_layers mlp resnet20 vgg16

CPU times of one thread in forward passes of the same network, and the peak of memory. A search
tries 20 values of α with one Jacobian; its ratio is to one prediction.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from acnml import Acnml, Bma, Gradient, Linearised
from benchmarks.recording import MEASUREMENTS, record, recorded
from benchmarks.subjects import SUBJECTS, Subject
from benchmarks.timing import fastest, peak

FILE = MEASUREMENTS / "all-layers.csv"
INPUTS = {"mlp": 200, "resnet20": 16, "vgg16": 16}
ALPHAS = torch.logspace(-3, 1, 20).tolist()
SEARCH = "search over 20 α"


def rows_of(name: str, subject: Subject, rounds: int) -> list[dict[str, object]]:
    """Measure one network with a diagonal and a Kronecker posterior."""
    count, classifier = INPUTS[name], subject.classifier
    x, many = subject.data[0][:count], subject.data[0][: 4 * count]
    runs: dict[str, Callable[[], object]] = {"forward pass": lambda: subject.network(many)}
    for key in ("diagonal", "Kronecker"):
        q = subject.posteriors[key]
        linear, bma = Acnml(classifier, q, alpha=0.1), Bma(classifier, q, samples=30)
        runs[f"{key}: linearised network"] = partial(linear, x)
        if key == "diagonal":
            runs[f"{key}: BMA, 30 samples"] = partial(bma, x)
            runs[f"{key}: {SEARCH}"] = partial(searched, linear, x)
            if name == "mlp":
                steps = Acnml(classifier, q, Gradient(5, 0.5), 0.1, "ignore")
                runs[f"{key}: five exact steps"] = partial(steps, x)
    with torch.no_grad():
        peaks = {method: peak(run) / 1e6 for method, run in runs.items()}  # and a warm-up
        times = fastest(runs, rounds)
    sizes = {method: len(many) if method == "forward pass" else count for method in runs}
    forward = times["forward pass"] / sizes["forward pass"]
    return [
        {
            "network": subject.name,
            "method": method,
            "milliseconds": 1000 * seconds / sizes[method],
            "forwards": seconds / sizes[method] / forward,
            "megabytes": peaks[method],
        }
        for method, seconds in times.items()
    ]


def searched(predict: Acnml, x: torch.Tensor) -> None:
    """Predict with every α from one problem."""
    problem = predict.problem(x)
    for alpha in ALPHAS:
        Linearised().of(problem.scaled(alpha))


def main() -> None:
    """Measure the networks named and add them to the file."""
    parser = argparse.ArgumentParser("python -m benchmarks.all_layers")
    parser.add_argument("networks", nargs="+", choices=INPUTS)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.networks:
        subject = SUBJECTS[name]()
        new = rows_of(name, subject, chosen.rounds)
        kept = [row for row in recorded(FILE) if row["network"] != subject.name]
        record(FILE, [*kept, *new])


if __name__ == "__main__":
    main()
