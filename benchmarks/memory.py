"""Measure the effect of glibc's malloc settings on run time (`python -m benchmarks.memory`).

The same predictions (ResNet-20, all weights, linearised) run in separate processes, alternately
with glibc's defaults and with the settings in docs/performance.md. With these settings a process
does not return freed memory to the system.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from acnml import Acnml, Linearised
from benchmarks.subjects import residual
from benchmarks.timing import fastest

KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
PROCESSES, ROUNDS, IMAGES = 3, 2, 50


def main() -> None:
    """Start processes that measure, or with the argument "here" measure in this process."""
    if sys.argv[1:] == ["here"]:
        print(f"{milliseconds():.0f}")
        return
    for _ in range(PROCESSES):
        for name, settings in {"default": {}, "keeping": KEEPING}.items():
            command = [sys.executable, "-m", "benchmarks.memory", "here"]
            environment = {**os.environ, **settings}
            found = subprocess.run(command, env=environment, capture_output=True, check=True)
            print(f"{name:<8} {found.stdout.decode().strip():>4} ms per image", flush=True)


def milliseconds() -> float:
    """Return the time per image on one core, the fastest of all rounds."""
    torch.set_num_threads(1)
    subject = residual()
    predict = Acnml(subject.classifier, subject.posteriors["diagonal"], Linearised())
    inputs = subject.data[0][:IMAGES]
    return 1e3 * fastest({"": lambda: predict(inputs)}, ROUNDS)[""] / IMAGES


if __name__ == "__main__":
    main()
