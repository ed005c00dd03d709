"""One prediction at a time, as in the paper's Table 1: `python -m benchmarks.single_input`.

Every number is the fastest of a few rounds with a single input and no batching. Networks are
untrained; what a prediction costs does not depend on the weights. An epoch of naive CNML is one
measured training step of 100 inputs, times the steps of an epoch, times ten labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from acnml import Acnml, Classifier, Diagonal, Gradient, Linearised
from studies.models import MODELS

BATCH, LABELS = 100, 10
# Name -> shape of an input, training images, whether five exact steps are affordable.
SUBJECTS = {
    "mlp": ((1, 28, 28), 60_000, True),
    "vgg16": ((3, 32, 32), 50_000, True),
    "wide_resnet28x10": ((3, 32, 32), 50_000, False),
}


def fastest(function: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print a table in Markdown."""
    print("| network | forward pass | linearised | five exact steps | naive CNML, one epoch |")
    print("|---|---:|---:|---:|---:|")
    for name, (shape, images, affordable) in SUBJECTS.items():
        model = MODELS[name].untrained(seed=0).eval()
        classifier, x = Classifier(model), torch.rand(1, *shape)
        mean = classifier.copy_parameters(list(classifier.parameters))
        posterior = Diagonal(mean, {n: torch.full_like(t, 1e-5) for n, t in mean.items()})

        def step(model: torch.nn.Module = model, shape: tuple[int, ...] = shape) -> None:
            labels = torch.zeros(BATCH, dtype=torch.long)
            functional.cross_entropy(model(torch.rand(BATCH, *shape)), labels).backward()

        def predict(solver: Linearised | Gradient) -> Callable[[], object]:
            built = Acnml(classifier, posterior, solver)  # noqa: B023
            return lambda: built(x)  # noqa: B023

        seconds = [
            fastest(lambda: classifier.log_probs(x), 20),  # noqa: B023
            fastest(predict(Linearised()), 2 if affordable else 1),
            fastest(predict(Gradient(5, 0.5)), 2) if affordable else float("nan"),
            fastest(step, 1) * images / BATCH * LABELS,
        ]
        cells = ["–" if s != s else f"{s:,.4g} s" for s in seconds]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
