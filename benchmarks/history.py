"""A few costs for every commit: `python -m benchmarks.history` adds a line to history.csv.

Each number is a ratio of CPU times in one process, so it hardly depends on the machine: what a
prediction costs, in forward passes of the network. The performance page shows the last five lines.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import torch
from torch import nn

import acnml
from benchmarks.recording import MEASUREMENTS, record, recorded

FILE = MEASUREMENTS / "history.csv"
REPEATS = 15


def main() -> None:
    """Measure this commit, in place of an earlier line of the same commit."""
    torch.set_num_threads(1)
    commit = _git("rev-parse", "--short", "HEAD")
    row: dict[str, object] = {
        "commit": commit,
        "date": _git("show", "-s", "--format=%cs"),
        **ratios(),
    }
    print(row)
    record(FILE, [*(old for old in recorded(FILE) if old["commit"] != commit), row])


def ratios() -> dict[str, object]:
    """Return the costs of several predictions, as ratios to one forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    x = torch.randn(1000, 784)
    y = (8 * model(x)).detach().softmax(-1).multinomial(1).flatten()
    train, validation = (x[:500], y[:500]), (x[500:], y[500:])
    classifier = acnml.Classifier(model)
    answers: dict[str, Callable[[torch.Tensor], object]] = {
        "calibrated": acnml.calibrate(model, train, validation, rule="acnml"),
        "closed form": acnml.calibrate(model, train, validation, rule="closed-form"),
        "ACNML, last layer": acnml.Acnml(
            classifier, acnml.fit_laplace(classifier, train, layers="last"), alpha=0.1
        ),
    }
    with torch.no_grad():
        found: dict[str, object] = {
            f"{name}, {label}": _ratio(predict, model, inputs)
            for name, predict in answers.items()
            for label, inputs in (("one input", x[:1]), ("200 inputs", x[:200]))
        }
    return found


def _ratio(
    predict: Callable[[torch.Tensor], object], model: nn.Module, inputs: torch.Tensor
) -> float:
    """Return the CPU time of a prediction over that of a forward pass, side by side."""
    predict(inputs)  # the first call checks the model
    pairs = [(_seconds(predict, inputs), _seconds(model, inputs)) for _ in range(REPEATS)]
    ours, plain = (min(times) for times in zip(*pairs, strict=True))
    return ours / plain


def _seconds(call: Callable[[torch.Tensor], object], inputs: torch.Tensor) -> float:
    """Return the CPU seconds of a call, over as many calls as the clock needs."""
    count = 0
    start = time.process_time()
    while time.process_time() - start < 0.02:
        call(inputs)
        count += 1
    return (time.process_time() - start) / count


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
