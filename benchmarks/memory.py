"""Measure the effect of glibc's malloc settings on run time (`python -m benchmarks.memory`).

The same predictions (ResNet-20, all weights, linearised) run in separate processes, alternately
with glibc's defaults and with the settings in docs/performance.md. With these settings a process
does not return freed memory to the system. Writes docs/results/measurements/malloc.csv.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from acnml import Acnml, Linearised
from benchmarks.recording import MEASUREMENTS, record
from benchmarks.subjects import residual
from benchmarks.timing import fastest

KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
PROCESSES, ROUNDS, IMAGES = 3, 2, 50


def main() -> None:
    """Start processes that measure, or with the argument "here" measure in this process."""
    if sys.argv[1:] == ["here"]:
        print(milliseconds())
        return
    rows: list[dict[str, object]] = []
    for process in range(PROCESSES):
        for name, settings in {"default": {}, "keeping": KEEPING}.items():
            command = [sys.executable, "-m", "benchmarks.memory", "here"]
            environment = {**os.environ, **settings}
            found = subprocess.run(command, env=environment, capture_output=True, check=True)
            rows.append({"malloc": name, "process": process, "ms": float(found.stdout)})
            print(rows[-1], flush=True)
    record(MEASUREMENTS / "malloc.csv", rows)


def milliseconds() -> float:
    """Return the time per image on one core, the fastest of all rounds."""
    torch.set_num_threads(1)
    subject = residual()
    predict = Acnml(subject.classifier, subject.posteriors["diagonal"], Linearised())
    inputs = subject.data[0][:IMAGES]
    return 1e3 * fastest({"": lambda: predict(inputs)}, ROUNDS)[""] / IMAGES


if __name__ == "__main__":
    main()
