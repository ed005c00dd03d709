"""Time and memory of computations, on a machine that may be busy.

On a CPU the time is that of the processor, of one thread: other programs disturb it less than the
time of a clock. Methods take turns, and the fastest of several rounds counts.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

CPU = torch.device("cpu")
STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def fastest(
    methods: Mapping[str, Callable[[], object]], rounds: int, device: torch.device = CPU
) -> dict[str, float]:
    """Return the fastest time of every method in seconds; each round runs all methods in turn."""
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(rounds):
        for name, run in methods.items():
            start = _now(device)
            run()
            best[name] = min(best[name], _now(device) - start)
    return best


def peak(run: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the memory in bytes that a call takes at most, above what is held before it.

    Linux tells it for the main memory, and torch for CUDA; elsewhere it is not a number.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return float(torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return float("nan")
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system
    FORGET.write_text("5")  # the peak so far
    before = bytes_of_status("VmRSS")
    run()
    return float(max(0, bytes_of_status("VmHWM") - before))


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    getattr(torch, device.type).synchronize()
    return time.perf_counter()


def bytes_of_status(name: str) -> int:
    """Return a number of bytes from the status of this process."""
    lines = STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
