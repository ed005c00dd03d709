"""How the cost of a prediction grows, next to what the arithmetic predicts.

Both are in forward passes of the same network. The prediction counts multiplications in products
with weights and variances, for a diagonal posterior over all layers. With n_l weights in layer l,
N = Σ n_l, M = N - n_1 (the first layer's inputs are the same at all weights) and K labels:

    linearised        2N + 3KM - M: the pass at the mean, the products of variances with inputs, a
                      backward pass for every class but one, and a displaced pass with two products
    T exact steps     2N + KM (1 + Σ_{s<T} 2(1 + s) + 1 + T) - M: step s has s terms of
                      displacement, forwards and backwards; a last pass has T

A layer with p positions counts p times, forwards and backwards. Its displacement has one term for
each position: with few positions it is kept in factors, which takes p products for each of p
inputs; with many it is written out, which takes p products once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml import Classifier, Diagonal, Gradient, Linearised
from acnml._util.torch_state import seeded
from benchmarks.recording import MEASUREMENTS, record
from benchmarks.timing import fastest

ROUNDS = 4


@final
@dataclass(frozen=True)
class Case:
    """A perceptron and how it is run; hidden layers see several positions, the last their mean."""

    width: int = 256
    depth: int = 2  # hidden layers
    positions: int = 1
    classes: int = 10
    batch: int = 64
    steps: int = 0  # exact steps; 0 stands for the linearised solution

    @property
    def weights(self) -> list[int]:
        """The products of every layer with one input."""
        hidden = self.positions * self.width**2
        return [*[hidden] * self.depth, self.width * self.classes]

    @property
    def predicted(self) -> float:
        """The arithmetic in forward passes."""
        total, beyond_first = sum(self.weights), sum(self.weights[1:])
        per_label: float = 3
        if self.steps:
            per_label = 2 + self.steps + sum(2 * (1 + s) for s in range(1, self.steps))
        if self.positions > 1:  # one more product: a weight gradient is written out for every label
            per_label += 1
        return 2 + (per_label * self.classes - 1) * beyond_first / total

    def network(self) -> nn.Module:
        """Return the perceptron."""
        layers: list[nn.Module] = []
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        with seeded(0):
            return nn.Sequential(*layers, _Mean(), nn.Linear(self.width, self.classes))

    def inputs(self, count: int) -> Tensor:
        """Return random inputs."""
        shape = (self.positions, self.width) if self.positions > 1 else (self.width,)
        return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


class _Mean(nn.Module):
    """The mean over positions, if there are several."""

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean(1) if x.ndim > 2 else x


CASE = Case()
CASES = {
    "width": [replace(CASE, width=value) for value in (64, 128, 256, 512, 1024)],
    "depth": [replace(CASE, depth=value) for value in (1, 2, 4, 8)],
    "positions": [replace(CASE, positions=value, batch=16) for value in (1, 2, 4, 16, 64)],
    "classes": [replace(CASE, classes=value) for value in (2, 5, 10, 20, 50, 100)],
    "batch": [replace(CASE, batch=value) for value in (1, 4, 16, 64, 256)],
    "steps": [replace(CASE, steps=value) for value in (1, 2, 5, 10)],
}


def growths() -> list[dict[str, Any]]:
    """Measure all cases: forward passes by measurement and by arithmetic."""
    rows = []
    for axis, cases in CASES.items():
        for case in cases:
            rows.append({"axis": axis, "value": getattr(case, axis), **_measured(case)})
            print(*rows[-1].values(), flush=True)
    return rows


def _measured(case: Case) -> dict[str, float]:
    seconds = _seconds(case)
    return {"forwards": seconds["solve"] / seconds["forward"], "predicted": case.predicted}


def _seconds(case: Case) -> dict[str, float]:
    """Return the seconds of a prediction and of a forward pass for the whole batch."""
    classifier = Classifier(case.network())
    mean = classifier.copy_parameters(list(classifier.parameters))
    posterior = Diagonal(mean, {n: torch.full_like(t, 1e-3) for n, t in mean.items()})
    solver = Gradient(case.steps, 0.5) if case.steps else Linearised()
    x = case.inputs(case.batch)
    times = max(1, 512 // case.batch)  # so that the short pass can be timed

    def solve() -> None:
        with torch.no_grad():
            solver.log_lik(classifier, posterior, x)

    def forward() -> None:
        with torch.no_grad():
            for _ in range(times):
                classifier.model(x)

    solve()  # a warm-up run: it allocates memory and selects kernels
    forward()
    seconds = fastest({"solve": solve, "forward": forward}, ROUNDS)
    return {**seconds, "forward": seconds["forward"] / times}


def main() -> None:
    """Measure the paper's five steps by the number of classes: `python -m benchmarks.scaling`."""
    torch.set_num_threads(1)
    rows = []
    for classes in (5, 10, 20, 50, 100):
        case = replace(CASE, classes=classes, steps=5)
        milliseconds = 1000 * _seconds(case)["solve"] / (case.batch * classes)
        rows.append({"classes": classes, "milliseconds_per_label": milliseconds})
    record(MEASUREMENTS / "classes.csv", rows)


if __name__ == "__main__":
    main()
