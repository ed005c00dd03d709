"""One prediction at a time, as in the paper's Table 1: `python -m benchmarks.single_input`.

Writes benchmarks/single_input.json, from which `make numbers` fills the table in docs/paper.md.

Every number is the CPU time of one thread for a single input, the least of a few repeats. CPU time
hardly changes when other programs share the machine; the least of several repeats also leaves out
most of what they do to the caches. Networks are untrained: what a prediction costs does not depend
on the weights. An epoch of naive CNML is a measured forward and backward pass, scaled to all
training images and ten labels; updating the weights comes on top.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import Acnml, Classifier, Diagonal, Gradient, Linearised
from studies.files import write_file
from studies.models import MODELS

RESULTS = Path(__file__).parent / "single_input.json"
LABELS = 10


class Subject(NamedTuple):
    """A network of the paper: its inputs, and how much of it is affordable on a CPU."""

    shape: tuple[int, ...]
    training_images: int
    batch: int  # images of the measured training step
    repeats: int  # of everything but the forward pass


SUBJECTS = {
    "mlp": Subject((1, 28, 28), 60_000, 100, 5),
    "vgg16": Subject((3, 32, 32), 50_000, 20, 2),
    "wide_resnet28x10": Subject((3, 32, 32), 50_000, 5, 1),
}
FORWARD_REPEATS = 20


def fastest(function: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def measure(model: nn.Module, subject: Subject) -> dict[str, float]:
    """Return the seconds of a prediction by every method."""
    classifier, x = Classifier(model), torch.rand(1, *subject.shape)
    mean = classifier.copy_parameters(list(classifier.parameters))
    posterior = Diagonal(mean, {n: torch.full_like(t, 1e-5) for n, t in mean.items()})
    images = torch.rand(subject.batch, *subject.shape)
    labels = torch.zeros(subject.batch, dtype=torch.long)

    def step() -> None:
        functional.cross_entropy(model(images), labels).backward()

    def predict(solver: Linearised | Gradient) -> Callable[[], Tensor]:
        built = Acnml(classifier, posterior, solver, on_unsolved="ignore")
        return lambda: built(x)

    an_image = fastest(step, subject.repeats) / subject.batch
    return {
        "forward pass": fastest(lambda: classifier.log_probs(x), FORWARD_REPEATS),
        "linearised": fastest(predict(Linearised("network")), subject.repeats),
        "five exact steps": fastest(predict(Gradient(5, 0.5)), subject.repeats),
        "naive CNML, an epoch": an_image * subject.training_images * LABELS,
    }


def main() -> None:
    """Measure the networks named as arguments, or all, and keep the saved results of the others."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SUBJECTS:
        seconds = measure(MODELS[name].untrained(seed=0).eval(), SUBJECTS[name])
        print(name, seconds, flush=True)
        saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        write_file(RESULTS, (json.dumps(saved | {name: seconds}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
