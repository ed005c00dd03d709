"""What was tried to make linearised solutions faster (`python -m benchmarks.trials`).

Writes docs/results/measurements/trials.csv: CPU times of one thread in forward passes of one image,
the fastest of several rounds, for 16 images, a ResNet-20 and a diagonal posterior over all weights.

    Jacobian         with glibc's malloc as it is, and with settings that keep the memory, each in a
                     process of its own
    linearised       in one chunk, in two, and with images in channels-last layout
    scale and relu   of the displaced pass, by torch's operators and compiled into one loop
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from acnml import Linearised
from acnml._engine.rows import Rows
from benchmarks.recording import MEASUREMENTS, record
from benchmarks.subjects import Subject, residual
from benchmarks.timing import fastest

IMAGES, ROUNDS, LABELS = 16, 6, 10
ENOUGH = 2**32  # bytes, for any number of images in one chunk
# With these settings glibc does not return freed memory to the system.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
Runs = dict[tuple[str, str], Callable[[], object]]

# The activations of a ResNet-20: how many layers have how many channels and positions a side.
ACTIVATIONS = ((7, 16, 32), (6, 32, 16), (6, 64, 8))


def main() -> None:
    """Run all trials and record them."""
    torch.set_num_threads(1)
    if sys.argv[1:] == ["jacobian"]:
        print(passes(residual(), jacobian)["Jacobian", ""])
        return
    rows: list[dict[str, object]] = []
    for name, settings in {"malloc as it is": {}, "memory is kept": KEEPING}.items():
        command = [sys.executable, "-m", "benchmarks.trials", "jacobian"]
        environment = {**os.environ, **settings}
        found = subprocess.run(command, env=environment, capture_output=True, check=True)
        rows.append({"part": "Jacobian", "trial": name, "passes": float(found.stdout)})
    subject = residual()
    for trials in (linearised, scale_and_relu):
        for (part, trial), value in passes(subject, trials).items():
            rows.append({"part": part, "trial": trial, "passes": value})
    for row in rows:
        print(*row.values())
    record(MEASUREMENTS / "trials.csv", rows)


def passes(subject: Subject, trials: Callable[[Subject], Runs]) -> dict[tuple[str, str], float]:
    """Return the time of every run for one image, in forward passes."""
    images = subject.data[0][: subject.forward_inputs]
    with torch.no_grad():
        runs = {("forward", ""): lambda: subject.network(images), **trials(subject)}
        for run in runs.values():
            run()  # torch loads its kernels
        seconds = fastest({"/".join(key): run for key, run in runs.items()}, ROUNDS)
    forward = seconds.pop("forward/") / len(images)
    parts = (key.split("/") for key in seconds)
    return {(p, t): s / IMAGES / forward for (p, t), s in zip(parts, seconds.values(), strict=True)}


def jacobian(subject: Subject) -> Runs:
    """Return one run: the gradients of all logits."""
    x, q = subject.data[0][:IMAGES], subject.posteriors["diagonal"]
    rows = Rows.at_mean(subject.classifier, q, x, 1)
    return {("Jacobian", ""): lambda: replace(rows).jacobian}  # a copy has not cached it


def linearised(subject: Subject) -> Runs:
    """Return runs with other chunks and another layout."""
    x, q = subject.data[0][:IMAGES], subject.posteriors["diagonal"]
    classifier, solver = subject.classifier, Linearised(memory=ENOUGH)

    def in_chunks(images: Tensor, count: int) -> Callable[[], object]:
        return lambda: [solver.log_lik(classifier, q, part) for part in images.chunk(count)]

    last = x.contiguous(memory_format=torch.channels_last)
    return {
        ("linearised", "one chunk"): in_chunks(x, 1),
        ("linearised", "two chunks"): in_chunks(x, 2),
        ("linearised", "channels last"): in_chunks(last, 2),
    }


def scale_and_relu(subject: Subject) -> Runs:
    """Return runs of normalisation and activation alone, for all rows of the images."""

    def scaled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(torch.addcmul(bias, x, weight))

    compiled = torch.compile(scaled, dynamic=True)
    tensors = [
        [torch.rand(IMAGES * LABELS, channels, *size) for size in ((side, side), (1, 1), (1, 1))]
        for layers, channels, side in ACTIVATIONS
        for _ in range(layers)
    ]
    return {
        ("scale and relu", "operators"): lambda: [scaled(*each) for each in tensors],
        ("scale and relu", "compiled"): lambda: [compiled(*each) for each in tensors],
    }


if __name__ == "__main__":
    main()
